"""Rows of keys and values as `kv_pages` stores them, in tiles whose widths are powers of two."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moebius_kernels.kv_pages import KvFormat, StoredRows
from moebius_kernels.triton.targets import power_of_two

MODEL, FP8, INT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FORMAT_CODES = {KvFormat.MODEL: 0, KvFormat.FP8: 1, KvFormat.INT8: 2}
# Numbers that share a scale in the format INT8.
_BLOCK = tl.constexpr(32)
# What is added and taken away again to round an fp32 number below 2^22 to an integer, ties to even.
_ROUND = tl.constexpr(12582912.0)


class Widths(NamedTuple):
    """A head in two tiles, the second one of width 0 where one is enough: 576 = 512 + 64."""

    first: int
    second: int


def widths(dim: int) -> Widths:
    """The least that tensor cores take is 16."""
    whole = max(16, power_of_two(dim))
    if whole == dim or dim <= 16:
        return Widths(whole, 0)
    rest = max(16, power_of_two(dim - whole // 2))
    return Widths(whole, 0) if rest == whole // 2 else Widths(whole // 2, rest)


def scales_of(rows: StoredRows) -> torch.Tensor:
    """For kernels, which need some pointer."""
    return rows.numbers if rows.scales is None else rows.scales


@triton.jit
def load_rows(
    numbers, scales, rows, seen, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + WIDTH of `rows` int64 [N], zeros where they are not `seen` or do not exist:
    [N, WIDTH] in `dtype`. Of the format FP8 the bare numbers, without their rows' scales."""
    column = FIRST + tl.arange(0, WIDTH)
    inside = seen[:, None]
    if FIRST + WIDTH > DIM:
        inside = inside & (column < DIM)[None, :]
    tile = tl.load(numbers + rows[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    if FORMAT == INT8:
        BLOCKS: tl.constexpr = (DIM + _BLOCK - 1) // _BLOCK
        OWN: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
        block = FIRST // _BLOCK + tl.arange(0, OWN)
        there = seen[:, None] & (block < BLOCKS)[None, :]
        scale = tl.load(scales + rows[:, None] * BLOCKS + block[None, :], mask=there, other=0.0)
        scale = tl.broadcast_to(scale.to(tl.float32)[:, :, None], (rows.shape[0], OWN, WIDTH // OWN))
        tile = tile.to(tl.float32) * scale.reshape(rows.shape[0], WIDTH)
    return tile.to(dtype)


@triton.jit
def store_rows(x, numbers, scales, rows, there, DIM: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Writes fp32 x [N, WIDTH], zero from column DIM on, to `rows` int64 [N] where `there`.

    What is not finite becomes 0.
    """
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    column = tl.arange(0, WIDTH)
    inside = there[:, None] & (column < DIM)[None, :]
    target = numbers + rows[:, None] * DIM + column[None, :]
    if FORMAT == FP8:
        scale = tl.math.div_rn(tl.max(tl.abs(x), 1), 448.0)
        tl.store(scales + rows, scale, mask=there)
        # What is so small that its scale is zero becomes zero.
        divisor = tl.where(scale == 0.0, float("inf"), scale)
        x = tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if FORMAT == INT8:
        BLOCKS: tl.constexpr = (DIM + _BLOCK - 1) // _BLOCK
        OWN: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
        blocks = x.reshape(rows.shape[0], OWN, WIDTH // OWN)
        scale = tl.math.div_rn(tl.max(tl.abs(blocks), 2), 127.0).to(tl.bfloat16)
        block = tl.arange(0, OWN)
        tl.store(
            scales + rows[:, None] * BLOCKS + block[None, :],
            scale,
            mask=there[:, None] & (block < BLOCKS)[None, :],
        )
        wide = scale.to(tl.float32)
        divisor = tl.where(wide == 0.0, float("inf"), wide)
        blocks = tl.math.div_rn(blocks, tl.broadcast_to(divisor[:, :, None], blocks.shape))
        blocks = tl.minimum(tl.maximum(blocks, -127.0), 127.0)
        x = ((blocks + _ROUND) - _ROUND).reshape(rows.shape[0], WIDTH)
    tl.store(target, x.to(numbers.dtype.element_ty), mask=inside)


@triton.jit
def fault_of(x):
    """NaN if anything in x [N, W] is not finite, else 0."""
    return tl.sum(tl.sum(x * 0.0, 1), 0)
