"""Launches of the grouped product."""

from dataclasses import dataclass

import torch
import triton

from moebius_kernels.activations import Activation, ClampedSwiglu, GeluTanh, Silu
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.launch import launch
from moebius_kernels.triton.grouped_gemm import grouped_gemm
from moebius_kernels.triton.layouts import Layout, layout_of
from moebius_kernels.triton.targets import ceil_div, generation_of, overlapping, power_of_two
from moebius_kernels.triton.tiling import Tiling


def interpreted() -> bool:
    """Kernels run in Triton's interpreter, on the CPU, without PTX."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Gated:
    """Gate and up rows go through an activation: up rows from `up_row` of the matrix `up` on."""

    activation: Activation
    up: StoredMatrix
    up_row: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Which rows of y go to which slot; `mode` and `tiles` as in `grouped_gemm`; `programs` tiles."""

    mode: str
    pairs: int
    programs: int
    pairs_of_x: int = 1
    experts: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    sorted_pairs: torch.Tensor | None = None
    tiles: torch.Tensor | None = None


def layout_for(matrix: StoredMatrix) -> Layout:
    """Raises ValueError for forms that kernels do not read."""
    layout = layout_of(matrix.format, matrix.shape[-1])
    if isinstance(layout, str):
        raise ValueError(layout)
    return layout


def gemm(
    x: torch.Tensor,
    matrix: StoredMatrix,
    y: torch.Tensor,
    routing: Routing,
    tiling: Tiling,
    *,
    bias: torch.Tensor | None = None,
    gated: Gated | None = None,
    stream: bool = False,
) -> None:
    """x [X, C] bf16; matrix [S, R, C] or [R, C]; y [splits, pairs, N], rows side by side. `stream`: the
    matrix is read once."""
    layout = layout_for(matrix)
    columns = matrix.shape[-1]
    n = y.shape[-1]
    tensors = layout.tensors(matrix)
    name, limit, alpha = activation_of(gated)
    blocks = ceil_div(n, tiling.rows)
    launch(
        grouped_gemm,
        (routing.programs * blocks * tiling.splits,),
        x, y,
        *tensors,
        *(tensors if gated is None else layout.tensors(gated.up)),
        x if bias is None else bias,
        _or(routing.experts, x), _or(routing.slots, x), _or(routing.sorted_pairs, x), _or(routing.tiles, x),
        routing.pairs, matrix.shape[-2], 0 if gated is None else gated.up_row, y.stride(1), y.stride(0),
        N=n, C=columns, CODE=layout.code, SCALES=layout.scales, GROUP=layout.group,
        BLOCK_ROWS=layout.block_rows, ROW_SCALE=layout.row_scale is not None, BIAS=bias is not None,
        ACTIVATION=name, LIMIT=limit, ALPHA=alpha,
        ROUTING=routing.mode, PAIRS=power_of_two(routing.pairs) if routing.mode == "group" else 1,
        SLOTS=routing.slots is not None, PAIRS_OF_X=routing.pairs_of_x,
        TOKENS=tiling.tokens // tiling.parts, PARTS=tiling.parts, ROWS=tiling.rows, COLUMNS=tiling.columns,
        SPLITS=tiling.splits, DEPTH=tiling.depth, SWAP=tiling.swap, PREFETCH=tiling.prefetch,
        POLICY="evict_first" if stream else "", ASM=not interpreted(),
        IN_ORDER=_in_order(tiling, x),
        num_warps=tiling.warps, num_stages=tiling.stages, maxnreg=tiling.registers or None, **overlapping(x),
    )  # fmt: skip


def _in_order(tiling: Tiling, x: torch.Tensor) -> bool:
    """Whether codes in words are expanded in the order of the columns, see `decode_words.py`."""
    if not tiling.swap:
        return True
    # What Triton 3.6 has for products of 64 rows and 16 tokens on: the registers of four warps are read, or
    # shared memory, where order is free.
    four_warps = tiling.warps % 4 == 0 and tiling.rows % 64 == 0
    large = four_warps and tiling.tokens // tiling.parts >= 16 and tiling.depth == 1
    # 0: the interpreter, which can do both.
    return large and generation_of(x) in (0, 9, 10)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def activation_of(gated: Gated | None) -> tuple[str, float, float]:
    """Name, limit and alpha."""
    match None if gated is None else gated.activation:
        case Silu():
            return "silu", 0.0, 0.0
        case GeluTanh():
            return "gelu_tanh", 0.0, 0.0
        case ClampedSwiglu(limit=limit, alpha=alpha):
            return "clamped_swiglu", limit, alpha
    return "", 0.0, 0.0
