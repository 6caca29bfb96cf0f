"""Routed experts by products that divide their labour, for many tokens on Hopper (`bf16_gemm_hopper.py` and
`words_gemm_hopper.py`).

On an H200, beside tiles that Triton divides by itself, with 8,192 tokens: of Qwen3-30B-A3B in bf16 1.15 ms
instead of 1.22, in NVFP4 1.18 instead of 1.46, in Q4_K 1.14 instead of 1.45, of gpt-oss-20b in MXFP4 2.83
instead of 3.31. With 64 pairs for each expert 0.33 instead of 0.39 (gpt-oss, 512 tokens); with 32, where
most of a tile is empty, more.
"""

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.e2m1_words import E2m1Words
from moebius_kernels.formats.int_words import IntWords
from moebius_kernels.registry import Backend, Query
from moebius_kernels.router import Route
from moebius_kernels.triton.admission import x_refusal
from moebius_kernels.triton.align import align
from moebius_kernels.triton.bf16_gemm_hopper import COLUMNS, bf16_gemm
from moebius_kernels.triton.experts import sum_experts
from moebius_kernels.triton.gemm import Gated
from moebius_kernels.triton.hopper_tiles import TOKENS
from moebius_kernels.triton.words_gemm_hopper import words_gemm

# For each expert.
_FEWEST_PAIRS = 64


def routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """As the reference; x bf16, matrices all bf16 or all words of one form, widths multiples of `COLUMNS`."""
    tokens, hidden = x.shape
    if not tokens:
        return torch.empty_like(x)
    chosen = route.experts.contiguous()
    top_k = chosen.shape[1]
    pairs = chosen.numel()
    inner = weights.down.shape[-1]
    alignment = align(chosen, weights.slots, weights.num_slots, TOKENS)
    middle = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    gate, up = weights.gate_up[0], weights.gate_up[-1]
    gated = Gated(activation, up, inner if len(weights.gate_up) == 1 else 0)
    multiply = words_gemm if isinstance(weights.down.format, E2m1Words | IntWords) else bf16_gemm
    multiply(
        x.contiguous(), gate, middle, alignment, pairs_of_x=top_k, bias=weights.gate_up_bias, gated=gated
    )
    outputs = torch.empty(1, pairs, hidden, dtype=x.dtype, device=x.device)
    multiply(middle, weights.down, outputs[0], alignment)
    return sum_experts(outputs, chosen, route.weights, weights)


def columns_refusal(query: Query) -> str | None:
    """Of matrices that steps do not divide."""
    for matrix in query.matrices:
        if matrix.shape[-1] % COLUMNS:
            return f"{matrix.shape[-1]} columns are no multiple of {COLUMNS}"
    return None


def _admits(query: Query) -> str | None:
    if reason := x_refusal(query) or columns_refusal(query):
        return reason
    form = query.arguments["weights"]["down"].format
    if form != Dense(torch.bfloat16) and not isinstance(form, E2m1Words | IntWords):
        return f"it multiplies bf16 and codes in words, not {form.name}"
    for matrix in query.matrices:
        if matrix.format != form:
            return f"matrices are in two forms, {matrix.format.name} and {form.name}"
    experts = query.arguments["weights"]["down"].shape[0]
    [top_k] = query.arguments["route"]["experts"].shape
    if query.tokens.first * top_k < _FEWEST_PAIRS * experts:
        return f"it is for {-(-_FEWEST_PAIRS * experts // top_k)} tokens and more"
    return None


BACKENDS = (
    Backend(
        "routed_experts",
        "triton_hopper",
        routed_experts,
        architectures=frozenset({(9, 0)}),
        admits=_admits,
    ),
)
