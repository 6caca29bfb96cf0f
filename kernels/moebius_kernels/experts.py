"""The feed-forward networks of the experts that tokens were routed to."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from moebius_kernels.activations import SILU, Activation, gated
from moebius_kernels.formats.dense import Dense, dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.linear import linear
from moebius_kernels.router import Route

# `linear`, or what computes nearly the same.
Product = Callable[[torch.Tensor, Sequence[StoredMatrix], torch.Tensor | None], torch.Tensor]

# Numbers of quantised matrices that are expanded together, beyond one matrix: on a GPU a hundred launches for
# each expert would take longer than what they do. A CPU's caches hold no more than one.
_EXPANDED_TOGETHER: Mapping[str, int] = MappingProxyType({"cuda": 1 << 25})


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, each in a slot of the S that there are.

    `gate_up`: one matrix [S, 2I, H], gate rows first, or two [S, I, H] where gate and up are stored in unlike
    forms. `down` [S, H, I]. Biases [S, 2I] and [S, H]. `slots` int64 [E]: where each expert is; None if
    expert e is in slot e.
    """

    gate_up: Sequence[StoredMatrix]
    down: StoredMatrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    slots: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        return self.down.shape[0]


def routed_experts(
    x: torch.Tensor,
    route: Route,
    weights: ExpertWeights,
    activation: Activation = SILU,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `sum_k weights[t, k] * down_e(act(gate_up_e(x[t])))`.

    x [T, H]; the result is [T, H] in x's dtype, its sum in fp32. An expert -1 is none. The weights of each
    expert that was hit are read once, however many tokens share it, and those of an expert without tokens
    never.
    """
    return weighted_sum(x, route, weights, activation, linear)


def weighted_sum(
    x: torch.Tensor,
    route: Route,
    weights: ExpertWeights,
    activation: Activation,
    product: Product,
) -> torch.Tensor:
    """The same, with the products that `product` computes."""
    num_tokens, top_k = route.experts.shape
    pair_slots = slots_of_pairs(route, weights)
    # Pairs (token, k) in the order of their experts, so that each expert's tokens lie side by side; before
    # them those without an expert, which add nothing.
    order = pair_slots.argsort(stable=True)
    inputs = x.index_select(0, order // top_k)
    outputs = torch.zeros_like(inputs)
    first, *counts = (pair_slots + 1).bincount(minlength=weights.num_slots + 1).tolist()
    hit = [slot for slot, count in enumerate(counts) if count]
    for slot, gate_up, down in _matrices_of(hit, weights, _EXPANDED_TOGETHER.get(x.device.type, 0)):
        rows = slice(first, first + counts[slot])
        gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[slot]
        down_bias = None if weights.down_bias is None else weights.down_bias[slot]
        hidden = gated(product(inputs[rows], gate_up, gate_up_bias), activation)
        outputs[rows] = product(hidden, [down], down_bias)
        first += counts[slot]
    # Back to (token, k), then the sum over k: unlike adding into a shared row, that has one order of
    # summation on every device.
    pairs = torch.empty_like(outputs).index_copy_(0, order, outputs).view(num_tokens, top_k, -1)
    return (pairs * route.weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def slots_of_pairs(route: Route, weights: ExpertWeights) -> torch.Tensor:
    """The slot of each (token, k), int64 [T * K]; -1 where there is no expert."""
    experts = route.experts.flatten()
    if weights.slots is None:
        return experts
    return torch.where(experts < 0, experts, weights.slots[experts])


def _matrices_of(
    slots: Sequence[int], weights: ExpertWeights, numbers: int
) -> Iterator[tuple[int, Sequence[StoredMatrix], StoredMatrix]]:
    """Each slot with its matrices, of which up to so many `numbers` are expanded together."""
    largest = max(math.prod(matrix.shape[1:]) for matrix in (*weights.gate_up, weights.down))
    together = max(1, numbers // largest)
    for start in range(0, len(slots), together):
        some = slots[start : start + together]
        gate_up = zip(*(_matrices(matrix, some) for matrix in weights.gate_up), strict=True)
        yield from zip(some, gate_up, _matrices(weights.down, some), strict=True)


def _matrices(matrix: StoredMatrix, slots: Sequence[int]) -> list[StoredMatrix]:
    if len(slots) == 1 or isinstance(matrix.format, Dense):
        return [matrix[slot] for slot in slots]
    return [dense(one) for one in matrix.take(slots).dequantize()]
