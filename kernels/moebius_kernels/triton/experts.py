"""Routed experts: gate and up with their activation, down, and each token's weighted sum.

Up to `_FEW_PAIRS` pairs, programs find the pairs of their expert themselves; beyond, pairs are aligned first.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.router import Route
from moebius_kernels.triton.admission import x_refusal
from moebius_kernels.triton.align import align, most_tiles
from moebius_kernels.triton.expert_tiling import ExpertShape, expert_tiling
from moebius_kernels.triton.gemm import Gated, Routing, gemm, layout_for
from moebius_kernels.triton.layouts import layout_of
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping, power_of_two
from moebius_kernels.triton.tiling import ExpertTiling

_FEW_PAIRS = 128


def routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """As the reference; x bf16."""
    tokens, top_k = route.experts.shape
    if not tokens:
        return torch.empty_like(x)
    tiling = expert_tiling(power_of_two(tokens), shape_of(weights, top_k))
    return tiled_experts(x, route, weights, activation, tiling)


def shape_of(weights: ExpertWeights, top_k: int) -> ExpertShape:
    """Raises ValueError for forms that kernels do not read."""
    _, hidden, inner = weights.down.shape
    codes = layout_for(weights.gate_up[0]).code, layout_for(weights.down).code
    return ExpertShape(*codes, weights.num_slots, top_k, hidden, inner)


def tiled_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation, tiling: ExpertTiling
) -> torch.Tensor:
    tokens, hidden = x.shape
    top_k = route.experts.shape[1]
    pairs = tokens * top_k
    experts = route.experts.contiguous()
    x = x.contiguous()
    routing = _routing(experts, weights, tiling.gate_up.tokens)
    gate, up = weights.gate_up[0], weights.gate_up[-1]
    inner = weights.down.shape[-1]
    middle = torch.empty(1, pairs, inner, dtype=x.dtype, device=x.device)
    stream = pairs <= 8 * weights.num_slots
    gated = Gated(activation, up, inner if len(weights.gate_up) == 1 else 0)
    gemm(
        x, gate, middle, routing(top_k), tiling.gate_up, bias=weights.gate_up_bias, gated=gated, stream=stream
    )
    splits = tiling.down.splits
    dtype = x.dtype if splits == 1 else torch.float32
    outputs = torch.empty(splits, pairs, hidden, dtype=dtype, device=x.device)
    gemm(middle[0], weights.down, outputs, routing(1), tiling.down, stream=stream)
    return sum_experts(outputs, experts, route.weights, weights)


def sum_experts(
    outputs: torch.Tensor, experts: torch.Tensor, route_weights: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """outputs [splits, T * K, H], of each pair; experts int64 [T, K], contiguous -> bf16 [T, H]."""
    splits, pairs, hidden = outputs.shape
    tokens, top_k = experts.shape
    y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=outputs.device)
    # Few tokens: more programs than these would have with long rows.
    block = 256 if tokens <= 64 else 1024
    launch(
        _sum_experts,
        (tokens * ceil_div(hidden, block),),
        outputs, experts, experts if weights.slots is None else weights.slots, route_weights.contiguous(),
        outputs if weights.down_bias is None else weights.down_bias, y, pairs,
        SLOTS=weights.slots is not None, BIAS=weights.down_bias is not None,
        TOP_K=top_k, SPLITS=splits, HIDDEN=hidden, BLOCK=block, num_warps=block // 128, **overlapping(y),
    )  # fmt: skip
    return y


def _routing(experts: torch.Tensor, weights: ExpertWeights, tokens: int):
    """Of the pairs, given how many of them have the same row of x."""
    pairs = experts.numel()
    if pairs <= _FEW_PAIRS:
        mode = "single" if experts.shape[0] == 1 else "group"
        return lambda share: Routing(mode, pairs, pairs, share, experts, weights.slots)
    found = align(experts, weights.slots, weights.num_slots, tokens)
    bound = most_tiles(pairs, weights.num_slots, tokens)
    return lambda share: Routing(
        "tiles", pairs, bound, share, sorted_pairs=found.sorted_pairs, tiles=found.tiles
    )


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _sum_experts(
    outputs, experts, slots, weights, bias, y, pairs,
    SLOTS: tl.constexpr, BIAS: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[t] = the sum over k, in their order, of weights[t, k] * (all splits of outputs[t, k] + its bias)."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        slot = tl.load(experts + pair)
        weight = tl.load(weights + pair)
        if SLOTS:
            slot = tl.load(slots + slot, slot >= 0, -1).to(tl.int64)
        value = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            here = outputs + (split * pairs + pair) * HIDDEN + at
            value += tl.load(here, inside, 0.0).to(tl.float32)
        if BIAS:
            value += tl.load(bias + slot * HIDDEN + at, inside & (slot >= 0), 0.0).to(tl.float32)
        # Nobody wrote what a pair without an expert has here; its weight may be NaN nevertheless.
        total += tl.where(slot >= 0, value, 0.0) * weight
    tl.store(y + token * HIDDEN + at, total.to(y.dtype.element_ty), inside)


def _admits(query: Query) -> str | None:
    if refused := x_refusal(query):
        return refused
    gate_up = query.arguments["weights"]["gate_up"]
    if gate_up[0].format != gate_up[-1].format:
        return f"gate and up are in two forms, {gate_up[0].format.name} and {gate_up[-1].format.name}"
    for matrix in query.matrices:
        if isinstance(reason := layout_of(matrix.format, matrix.shape[-1]), str):
            return reason
    return None


BACKENDS = (
    Backend(
        "routed_experts",
        "triton",
        routed_experts,
        architectures=ARCHITECTURES,
        admits=_admits,
    ),
)
