"""The feed-forward networks of the experts that tokens were routed to."""

import torch
import torch.nn.functional as F

from moebius_kernels.router import Route
from moebius_kernels.swiglu import swiglu


def routed_experts(x: torch.Tensor, route: Route, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, `sum_k weights[t, k] * down_e(swiglu(gate_up_e(x[t])))`.

    x [T, H]; gate_up [E, 2I, H], gate rows first; down [E, H, I]; the result is [T, H] in x's dtype, its
    sum in fp32. The weights of each expert that was hit are read once, however many tokens share it, and
    those of an expert without tokens never.
    """
    num_tokens, top_k = route.experts.shape
    pair_experts = route.experts.flatten()
    # Pairs (token, k) in the order of their experts, so that each expert's tokens lie side by side.
    order = pair_experts.argsort(stable=True)
    inputs = x.index_select(0, order // top_k)
    outputs = torch.empty_like(inputs)
    first = 0
    for expert, count in enumerate(pair_experts.bincount(minlength=gate_up.shape[0]).tolist()):
        if count:
            rows = slice(first, first + count)
            hidden = swiglu(F.linear(inputs[rows], gate_up[expert]))
            outputs[rows] = F.linear(hidden, down[expert])
            first += count
    # Back to (token, k), then the sum over k: unlike adding into a shared row, that has one order of
    # summation on every device.
    pairs = torch.empty_like(outputs).index_copy_(0, order, outputs).view(num_tokens, top_k, -1)
    return (pairs * route.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
