"""The product of FP8 activations with the FP8 matrices of experts.

Hopper's tensor cores add up FP8 products with about 14 bits. So each 128 columns are a product of their own,
which is scaled and then added in fp32.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.rounded_activations import GROUP
from moebius_kernels.launch import launch
from moebius_kernels.triton.align import Alignment
from moebius_kernels.triton.fp8_activations import Rounded, round_group
from moebius_kernels.triton.gemm import Gated, activation_of, interpreted
from moebius_kernels.triton.targets import ceil_div, overlapping
from moebius_kernels.triton.tile_products import activate
from moebius_kernels.triton.tiling import Tiling

_GROUP = tl.constexpr(GROUP)


def fits(format: Fp8, rows: int, columns: int) -> str | None:
    """Why the kernel does not read such a matrix."""
    if columns % GROUP:
        return f"{columns} columns are no multiple of {GROUP}"
    if (format.block_rows, format.block_columns) not in ((1, None), (GROUP, GROUP)):
        return f"{format.name} has neither a factor a row nor one a block of {GROUP}x{GROUP}"
    return None


def fp8_gemm(
    x: Rounded,
    matrix: StoredMatrix,
    y: torch.Tensor | Rounded,
    alignment: Alignment,
    tiling: Tiling,
    gated: Gated | None = None,
) -> None:
    """x [P, C], rows in the order of the sorted pairs; matrix [S, R, C]; y [P, N]: rounded, and in that order
    too, or bf16, in the order of the pairs.

    `tiling`: `tokens` by `rows`, of which 256 are two products; those of gate and up are two anyway.
    """
    columns = matrix.shape[-1]
    output, factors = (y.codes, y.scale) if isinstance(y, Rounded) else (y, x.scale)
    name, limit, alpha = activation_of(gated)
    up = matrix if gated is None else gated.up
    width = output.shape[1]
    height = min(tiling.rows, GROUP)
    scales = x.scale, matrix.parts["scale"], up.parts["scale"]
    launch(
        _fp8_gemm,
        (len(alignment.tiles) * ceil_div(width, tiling.rows),),
        *scales, _tiles_of(x.codes, tiling.tokens),
        _tiles_of(matrix.parts["data"], height), _tiles_of(up.parts["data"], height),
        output, factors, alignment.sorted_pairs, alignment.tiles,
        matrix.shape[-2], 0 if gated is None else gated.up_row, x.scale.stride(1),
        N=width, C=columns, BY_BLOCK=matrix.format.block_columns is not None,  # type: ignore[attr-defined]
        ACTIVATION=name, LIMIT=limit, ALPHA=alpha, ROUND=isinstance(y, Rounded),
        TOKENS=tiling.tokens, ROWS=tiling.rows, ASM=not interpreted(),
        num_warps=tiling.warps, num_stages=tiling.stages, **overlapping(output),
    )  # fmt: skip


def _tiles_of(codes: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of the matrix or matrices, one below the other; such tiles the GPU copies by itself."""
    return TensorDescriptor.from_tensor(codes.view(-1, codes.shape[-1]), [rows, GROUP])


@triton.jit
def _fp8_gemm(
    x_scale, scale, up_scale, x, codes, up_codes, y, y_scale, sorted_pairs, tiles,
    rows_of_slot, up_row, pairs,
    N: tl.constexpr, C: tl.constexpr, BY_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, ROUND: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[row, n] = x[row] . W[slot, n]; with an ACTIVATION, of gate rows and of up rows from `up_row` on.

    A program has a tile of TOKENS by ROWS of y. Where ROWS is 256, it has two products of 128 rows each with
    the same x, as with gate and up. ROUND: y becomes codes, with a factor for each row of a tile. Factors of
    activations are [groups, pairs].
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    GROUPS: tl.constexpr = C // _GROUP
    TWO: tl.constexpr = ACTIVATION != "" or ROWS > _GROUP
    WIDTH: tl.constexpr = _GROUP if ROWS > _GROUP else ROWS
    block = tl.program_id(0) % BLOCKS
    tile = tl.program_id(0) // BLOCKS
    slot = tl.load(tiles + 3 * tile)
    if slot < 0:
        return
    start = tl.load(tiles + 3 * tile + 1)
    place = start + tl.arange(0, TOKENS)
    inside = place < tl.load(tiles + 3 * tile + 2)

    first = block * ROWS
    # Of the last rows there may be but one product's.
    other_first = tl.minimum(first + WIDTH, N - 1) if ROWS > _GROUP else first + up_row
    blocks_of_slot = (rows_of_slot + _GROUP - 1) // _GROUP
    scale_at = scale + (slot * blocks_of_slot + first // _GROUP) * GROUPS
    other_scale_at = up_scale + (slot * blocks_of_slot + other_first // _GROUP) * GROUPS
    row, other_row = slot * rows_of_slot + first, slot * rows_of_slot + other_first
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    other = tl.zeros((TOKENS, WIDTH), tl.float32)
    for group in range(GROUPS):
        factor = tl.load(x_scale + group * pairs + place, inside, 0.0)
        x_tile = x.load([start, group * _GROUP])
        product = _dot(x_tile, codes.load([row, group * _GROUP]), ASM)
        total += product * (factor * tl.load(scale_at + group) if BY_BLOCK else factor)[:, None]
        if TWO:
            product = _dot(x_tile, up_codes.load([other_row, group * _GROUP]), ASM)
            other += product * (factor * tl.load(other_scale_at + group) if BY_BLOCK else factor)[:, None]

    n = first + tl.arange(0, WIDTH)
    other_n = n + WIDTH if ROWS > _GROUP else n
    if not BY_BLOCK:
        total *= tl.load(scale + slot * rows_of_slot + n, n < N, 0.0)[None, :]
        if TWO:
            other_at = up_scale + slot * rows_of_slot + other_n + (0 if ROWS > _GROUP else up_row)
            other *= tl.load(other_at, other_n < N, 0.0)[None, :]
    if ACTIVATION != "":
        total = activate(total, other, ACTIVATION, LIMIT, ALPHA)
    if ROUND:
        rounded, factor = round_group(total, False)
        y_at = y + place.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(y_at, rounded, inside[:, None])
        tl.store(y_scale + block * pairs + place, factor, inside)
    else:
        pair = tl.load(sorted_pairs + place, inside, 0).to(tl.int64)
        y_at = y + pair[:, None] * N + n[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), inside[:, None] & (n < N)[None, :])
        if ROWS > _GROUP:
            keep = inside[:, None] & (other_n < N)[None, :]
            tl.store(y_at + WIDTH, other.to(y.dtype.element_ty), keep)


@triton.jit
def _dot(x, w, ASM: tl.constexpr):
    if not ASM:
        # The interpreter multiplies the codes' bits.
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w.trans())
