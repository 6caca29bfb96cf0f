"""Routed experts by way of all of a layer's in bf16: for so many tokens that the detour is the shorter way.

Tiles of many tokens expand an expert's weights again for each tile of its tokens; this does it once, and
multiplies by `hopper_experts.py`. On an H200 a layer of Qwen3-30B-A3B in FP8, activations in bf16, takes 1.62
ms instead of 2.26 with 8,192 tokens. Which is faster is seen by preflight.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import Dense, dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.registry import Backend, Query
from moebius_kernels.router import Route
from moebius_kernels.triton import hopper_experts
from moebius_kernels.triton.admission import x_refusal
from moebius_kernels.triton.expand import expanded
from moebius_kernels.triton.hopper_experts import columns_refusal
from moebius_kernels.triton.layouts import layout_of

_FEWEST_TOKENS = 4096
# Of memory that caches would have otherwise.
_MOST_BYTES = 2 << 30


def routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """As the reference; x bf16, matrices in any forms, widths multiples of `bf16_gemm_hopper.COLUMNS`."""
    gate_up = [_expanded(matrix) for matrix in weights.gate_up]
    wide = replace(weights, gate_up=gate_up, down=_expanded(weights.down))
    return hopper_experts.routed_experts(x, route, wide, activation)


def _expanded(matrix: StoredMatrix) -> StoredMatrix:
    """Of [S, R, C], as if these were S * R rows of one matrix."""
    slots, rows, columns = matrix.shape
    parts = {name: part.flatten(0, 1) for name, part in matrix.parts.items()}
    below = StoredMatrix(matrix.format, (slots * rows, columns), parts)
    return dense(expanded(below).view(slots, rows, columns))


def _admits(query: Query) -> str | None:
    if reason := x_refusal(query, _FEWEST_TOKENS) or columns_refusal(query):
        return reason
    for matrix in query.matrices:
        if isinstance(matrix.format, Dense):
            return "there is nothing to expand"
        layout = layout_of(matrix.format, matrix.shape[-1])
        if isinstance(layout, str):
            return layout
        if matrix.shape[-2] % layout.block_rows:
            return f"{matrix.shape[-2]} rows are no multiple of {layout.block_rows}"
    if (needed := _expanded_bytes(query.arguments["weights"])) > _MOST_BYTES:
        return f"{needed} bytes for weights in bf16 are too many"
    return None


def _expanded_bytes(weights: Mapping[str, Any]) -> int:
    return sum(2 * math.prod(matrix.shape) for matrix in (*weights["gate_up"], weights["down"]))


BACKENDS = (
    Backend(
        "routed_experts",
        "triton_expanded",
        routed_experts,
        architectures=frozenset({(9, 0)}),
        admits=_admits,
    ),
)
