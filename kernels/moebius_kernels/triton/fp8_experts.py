"""Routed experts by FP8 products: activations are rounded to E4M3 as the checkpoint declares it.

For many tokens, where products and not bytes take the time. Both products have their rows of x in the order
of the experts, side by side in a tile, which the GPU then copies by itself: each token's row is rounded once
and written for each of its experts, and what is between the products is rounded as it is made.
"""

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.registry import Backend, Query
from moebius_kernels.rounded_products import routed_experts as reference
from moebius_kernels.router import Route
from moebius_kernels.triton import fp8_gemm_hopper
from moebius_kernels.triton.admission import x_refusal
from moebius_kernels.triton.align import Alignment, align
from moebius_kernels.triton.expert_tiling import FP8_BY_FP8, ExpertShape, expert_tiling
from moebius_kernels.triton.experts import sum_experts
from moebius_kernels.triton.fp8_activations import Rounded, rounded_activations
from moebius_kernels.triton.fp8_gemm import fits, fp8_gemm
from moebius_kernels.triton.gemm import Gated
from moebius_kernels.triton.targets import FP8_ARCHITECTURES, power_of_two
from moebius_kernels.triton.tiling import ExpertTiling, Tiling

# With fewer, tiles of 64 tokens are all but empty.
_FEWEST_TOKENS = 32


def routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """As the reference in `rounded_products.py`; x bf16."""
    tokens, top_k = route.experts.shape
    if not tokens:
        return torch.empty_like(x)
    tiling = expert_tiling(power_of_two(tokens), shape_of(weights, top_k))
    return tiled_experts(x, route, weights, activation, tiling)


def shape_of(weights: ExpertWeights, top_k: int) -> ExpertShape:
    """As tilings know it."""
    _, hidden, inner = weights.down.shape
    return ExpertShape(FP8_BY_FP8, FP8_BY_FP8, weights.num_slots, top_k, hidden, inner)


def tiled_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation, tiling: ExpertTiling
) -> torch.Tensor:
    """`tiling`: the tiles of gate and up have 128 rows, those of down as many tokens."""
    experts = route.experts.contiguous()
    pairs = experts.numel()
    hidden, inner = weights.down.shape[-2:]
    alignment = align(experts, weights.slots, weights.num_slots, tiling.gate_up.tokens)
    rounded = rounded_activations(x, alignment.sorted_pairs)
    gate, up = weights.gate_up[0], weights.gate_up[-1]
    middle = Rounded.empty(pairs, inner, x.device)
    gated = Gated(activation, up, inner if len(weights.gate_up) == 1 else 0)
    _multiply(rounded, gate, middle, alignment, tiling.gate_up, gated)
    outputs = torch.empty(1, pairs, hidden, dtype=x.dtype, device=x.device)
    _multiply(middle, weights.down, outputs[0], alignment, tiling.down)
    return sum_experts(outputs, experts, route.weights, weights)


def _multiply(
    x: Rounded,
    matrix: StoredMatrix,
    y: torch.Tensor | Rounded,
    alignment: Alignment,
    tiling: Tiling,
    gated: Gated | None = None,
) -> None:
    hopper = fp8_gemm_hopper.serves(x, matrix, tiling)
    (fp8_gemm_hopper.fp8_gemm if hopper else fp8_gemm)(x, matrix, y, alignment, tiling, gated)


def _admits(query: Query) -> str | None:
    if reason := x_refusal(query, _FEWEST_TOKENS):
        return reason
    weights = query.arguments["weights"]
    if weights["gate_up_bias"] is not None or weights["down_bias"] is not None:
        return "it adds no biases"
    if weights["gate_up"][0].format != weights["gate_up"][-1].format:
        return "gate and up are in two forms"
    for matrix in query.matrices:
        if not isinstance(matrix.format, Fp8) or not matrix.format.rounds_activations:
            return f"the checkpoint does not declare that activations of {matrix.format.name} are rounded"
        if reason := fits(matrix.format, *matrix.shape[-2:]):
            return reason
    return None


BACKENDS = (
    Backend(
        "routed_experts",
        "triton_fp8",
        routed_experts,
        architectures=FP8_ARCHITECTURES,
        admits=_admits,
        reference=reference,
    ),
)
