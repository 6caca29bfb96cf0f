"""Stored matrices as plain bf16 ones: for products so large that a library's outweighs the detour."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.launch import launch
from moebius_kernels.triton.decode import accumulator_factor, load_tile, octet_hint
from moebius_kernels.triton.gemm import interpreted, layout_for
from moebius_kernels.triton.targets import ceil_div, overlapping

_ROWS, _COLUMNS = 32, 256


def expanded(matrix: StoredMatrix) -> torch.Tensor:
    """[R, C] -> its numbers, bf16 [R, C]. Raises ValueError for forms that kernels do not read."""
    rows, columns = matrix.shape
    layout = layout_for(matrix)
    tensors = layout.tensors(matrix)
    output = torch.empty(rows, columns, dtype=torch.bfloat16, device=tensors[0].device)
    launch(
        _expand,
        (ceil_div(rows, _ROWS), ceil_div(columns, _COLUMNS)),
        *tensors, output, rows,
        C=columns, CODE=layout.code, SCALES=layout.scales, GROUP=layout.group, BLOCK_ROWS=layout.block_rows,
        ROW_SCALE=layout.row_scale is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, ASM=not interpreted(),
        num_warps=4, **overlapping(output),
    )  # fmt: skip
    return output


@triton.jit
def _expand(
    codes, high, scale, extra, row_scale, output, rows,
    C: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    ROW_SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    column = tl.program_id(1) * COLUMNS
    w = load_tile(
        codes, high, scale, extra, octet_hint(codes), row, row // BLOCK_ROWS, column,
        C, C % COLUMNS == 0, CODE, SCALES, GROUP, ROWS, COLUMNS, ASM, "", False, True,
    )  # fmt: skip
    factor = tl.full((ROWS,), accumulator_factor(CODE, ASM), tl.float32)
    if ROW_SCALE:
        factor *= tl.load(row_scale + row)
    at = column + tl.arange(0, COLUMNS)
    keep = (n < rows)[:, None] & (at < C)[None, :]
    y = (w.to(tl.float32) * factor[:, None]).to(tl.bfloat16)
    tl.store(output + row[:, None] * C + at[None, :], y, keep)
