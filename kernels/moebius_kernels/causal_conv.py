"""A short causal convolution along each request's tokens, channel by channel."""

from typing import Literal

import torch
import torch.nn.functional as F

from moebius_kernels.state_plan import StatePlan


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    plan: StatePlan,
    activation: Literal["silu"] | None,
    dilation: int = 1,
) -> torch.Tensor:
    """`y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - (K - 1 - j) * dilation, c])`, in fp32, returned in
    x's dtype.

    x [T, C], weight [C, K], bias [C]. `states` [slots, C, (K - 1) * dilation] holds so many inputs of each
    request before this step, the oldest first; it is left with those before the next.
    """
    kept = (weight.shape[1] - 1) * dilation
    output = torch.empty_like(x)
    kernel = weight.float().unsqueeze(1)
    offset = None if bias is None else bias.float()

    def convolve(past: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Past [B, C, kept] and rows [B, C, L] -> outputs [B, C, L] and the past [B, C, kept] then."""
        inputs = torch.cat((past.float(), rows.float()), dim=-1)
        y = F.conv1d(inputs, kernel, offset, dilation=dilation, groups=rows.shape[1])
        if activation == "silu":
            y = F.silu(y)
        return y.to(x.dtype), inputs[..., inputs.shape[-1] - kept :]

    if len(plan.rows):
        rows = x.index_select(0, plan.rows).unsqueeze(-1)
        y, past = convolve(states.index_select(0, plan.slots), rows)
        output.index_copy_(0, plan.rows, y.squeeze(-1))
        states.index_copy_(0, plan.slots, past.to(states.dtype))
    for segment in plan.segments:
        rows = x[segment.first_row : segment.last_row].T.unsqueeze(0)
        y, past = convolve(states[segment.slot].unsqueeze(0), rows)
        output[segment.first_row : segment.last_row] = y[0].T
        states[segment.slot] = past[0]
    return output
