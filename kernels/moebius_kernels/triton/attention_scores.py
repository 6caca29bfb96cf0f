"""What decode and prefill attention share: scores of a tile of keys, and softmax as it grows."""

import triton
import triton.language as tl

from moebius_kernels.triton.kv_rows import FP8, load_rows

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def slots_of(table, key, seen, PAGE: tl.constexpr):
    """Where the keys [N] of a request with the block table `table` lie, int64: page * PAGE + offset."""
    page = tl.load(table + key // PAGE, mask=seen, other=0)
    return page.to(tl.int64) * PAGE + key % PAGE


@triton.jit
def in_log2(scale, SOFTCAP: tl.constexpr):
    """What `capped` products of queries and keys are multiplied by to be scores in units of log 2."""
    return _LOG2_E if SOFTCAP else scale * _LOG2_E


@triton.jit
def capped(products, scale, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) needs no tanh of the hardware and overflows to the right ends.
        products = softcap - 2.0 * softcap / (tl.exp2(products * (scale * 2.0 * _LOG2_E / softcap)) + 1.0)
    return products


@triton.jit
def attend_tile(
    q0, q1, sums0, sums1, largest, total, rows, seen, visible,
    key_numbers, key_scales, value_numbers, value_scales, scale, softcap,
    KEY_DIM: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr,
    FORMAT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, REUSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes N keys and their values, at `rows` int64 [N] where `seen`, into the running softmax of M queries.

    q0 [M, K0] and q1 [M, K1], sums of values [M, V0] and [M, V1],
    largest score (before `in_log2`, whose factor
    is positive) and sum of weights [M].
    `visible` [M, N] or [1, N],
    looked at if MASKED. REUSE: the values are the numbers of the keys' first tile.
    """
    dtype: tl.constexpr = q0.dtype
    k0 = load_rows(key_numbers, key_scales, rows, seen, KEY_DIM, 0, K0, FORMAT, dtype)
    scores = tl.dot(q0, k0.T, input_precision=PRECISION)
    if K1 > 0:
        k1 = load_rows(key_numbers, key_scales, rows, seen, KEY_DIM, K0, K1, FORMAT, dtype)
        scores = tl.dot(q1, k1.T, scores, input_precision=PRECISION)
    if FORMAT == FP8:
        scores = scores * tl.load(key_scales + rows, mask=seen, other=0.0)[None, :]
    scores = capped(scores, scale, softcap, SOFTCAP)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(largest, tl.max(scores, 1))
    shift = top
    if MASKED:
        # A row that has seen no key yet keeps its sums of zero.
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    factor = in_log2(scale, SOFTCAP)
    shift = shift * factor
    # One fused operation a score.
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(largest * factor - shift)
    total = total * fade + tl.sum(weights, 1)
    if FORMAT == FP8:
        weights = weights * tl.load(value_scales + rows, mask=seen, other=0.0)[None, :]
    weights = weights.to(dtype)
    v0 = k0
    if not REUSE:
        v0 = load_rows(value_numbers, value_scales, rows, seen, VALUE_DIM, 0, V0, FORMAT, dtype)
    sums0 = tl.dot(weights, v0, sums0 * fade[:, None], input_precision=PRECISION)
    if V1 > 0:
        v1 = load_rows(value_numbers, value_scales, rows, seen, VALUE_DIM, V0, V1, FORMAT, dtype)
        sums1 = tl.dot(weights, v1, sums1 * fade[:, None], input_precision=PRECISION)
    return sums0, sums1, top, total


@triton.jit
def load_queries(q, there, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Columns FIRST to FIRST + WIDTH of the queries at the pointers q [M]."""
    column = FIRST + tl.arange(0, WIDTH)
    inside = there[:, None] & (column < DIM)[None, :]
    return tl.load(q[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def fault_of_rows(q):
    """NaN for rows of q [M, W] that are not finite, else 0: where a sum of weights begins."""
    return tl.sum(q.to(tl.float32) * 0.0, 1)


@triton.jit
def store_output(
    output, sums0, sums1, largest, total, sinks, there,
    DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Sums of values over the sum of weights to the rows at the pointers `output` [M]; zeros where that is
    zero. `largest` is in units of log 2; `sinks` [M] point to scores that have no value."""
    fade = tl.full(total.shape, 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks, mask=there, other=0.0).to(tl.float32) * _LOG2_E
        top = tl.maximum(largest, sink)
        fade = tl.exp2(largest - top)
        total = total * fade + tl.exp2(sink - top)
    fade = fade / tl.where(total == 0.0, 1.0, total)
    _store(output, sums0 * fade[:, None], there, DIM, 0, V0)
    if V1 > 0:
        _store(output, sums1 * fade[:, None], there, DIM, V0, V1)


@triton.jit
def _store(output, y, there, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    inside = there[:, None] & (column < DIM)[None, :]
    tl.store(output[:, None] + column[None, :], y.to(output.dtype.element_ty), mask=inside)
