"""Attention of requests with one row each: a KV head's keys are divided among programs (flash decoding)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.launch import launch
from moebius_kernels.triton.attention_scores import (
    attend_tile,
    fault_of_rows,
    in_log2,
    load_queries,
    slots_of,
    store_output,
)
from moebius_kernels.triton.kv_rows import FORMAT_CODES, scales_of, widths
from moebius_kernels.triton.targets import ceil_div, overlapping, power_of_two

_MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """`heads` queries of a KV head and `keys` at a time; keys are split so that there are about `programs`
    programs, each with at least `least` keys to itself,
    and `per_root` times the square root of the length: the
    results of splits are put together one after another, so that more splits are not always faster."""

    heads: int
    keys: int
    warps: int
    stages: int
    least: int = 128
    programs: int = 528
    per_root: int = 4


def decode_tiling(shared: int, key_dim: int, itemsize: int, requests: int) -> DecodeTiling:
    """What was fastest on an H200. `shared`: query heads of a KV head."""
    heads = min(32, max(16, power_of_two(shared)))
    if itemsize == 4:
        return DecodeTiling(heads, 32 if key_dim <= 128 else 16, 4, 2)
    if key_dim > 256:
        # Many requests with many heads: products decide, and 64 rows make the most of tensor cores.
        if shared >= 64 and requests >= 8:
            return DecodeTiling(64, 64, 8, 3, 256, 132)
        return DecodeTiling(16, 32, 4, 3)
    if key_dim > 128:
        return DecodeTiling(heads, 64, 4, 3)
    return DecodeTiling(heads, 128, 4, 3)


def decode_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: DeviceAttentionPlan,
    output: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tiling: DecodeTiling | None = None,
) -> None:
    """Writes the rows of the plan's decodes to `output` [T, heads, Dv], zeros for padding."""
    keys, values = kv_pages.keys, kv_pages.values or kv_pages.keys
    heads, kv_heads = q.shape[1], kv_pages.kv_heads
    shared = heads // kv_heads
    tiling = tiling or decode_tiling(shared, keys.dim, q.dtype.itemsize, plan.num_decodes)
    blocks, real = ceil_div(shared, tiling.heads), min(tiling.heads, power_of_two(shared))
    groups = plan.num_decodes * kv_heads * blocks
    if groups == 0:
        return
    splits = max(1, min(_MOST_SPLITS, tiling.programs // groups))
    k0, k1 = widths(keys.dim)
    v0, v1 = widths(kv_pages.value_dim)
    # Of each query: sums of values, then largest score and sum of weights; whole words of 16 bytes.
    partial = q.new_empty(
        (groups * splits, tiling.heads, v0 + v1 + 4) if splits > 1 else 1, dtype=torch.float32
    )
    launch(
        _decode,
        (groups, splits),
        q, keys.numbers, scales_of(keys), values.numbers, scales_of(values), q if sinks is None else sinks,
        output,
        partial, plan.arrivals, plan.block_tables, plan.first_rows, plan.num_keys,
        scale, softcap or 0.0, splits, q.stride(0), q.stride(1), plan.block_tables.stride(0),
        plan.arrivals.stride(0),
        SHARED=shared, KV_HEADS=kv_heads, BLOCKS=blocks, KEY_DIM=keys.dim, K0=k0, K1=k1,
        VALUE_DIM=kv_pages.value_dim, VALUE_ROW=values.dim, V0=v0, V1=v1, PAGE=plan.page_size,
        WINDOW=plan.window or 0, FORMAT=FORMAT_CODES[keys.format], SINKS=sinks is not None,
        SOFTCAP=softcap is not None,
        REUSE=kv_pages.values is None and v1 == 0 and v0 == k0 == kv_pages.value_dim,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        M=tiling.heads, N=tiling.keys, LEAST=tiling.least, PER_ROOT=tiling.per_root, SPLIT=splits > 1,
        REAL=real,
        STAGES=tiling.stages, num_warps=tiling.warps, **overlapping(q),
    )  # fmt: skip


@triton.jit(do_not_specialize=["most_splits"], do_not_specialize_on_alignment=["table_row"])
def _decode(
    q, key_numbers, key_scales, value_numbers, value_scales, sinks, output,
    partial, arrivals, block_tables, first_rows, num_keys,
    scale, softcap, most_splits, q_row, q_head, table_row, arrival_row,
    SHARED: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS: tl.constexpr, KEY_DIM: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, FORMAT: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    REUSE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr, PER_ROOT: tl.constexpr, SPLIT: tl.constexpr,
    REAL: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one request and KV head, for M of its query heads. The last of the splits that
    have keys puts their results together."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    request = pid // (KV_HEADS * BLOCKS)
    group = pid % (KV_HEADS * BLOCKS)
    kv_head = group // BLOCKS
    own = (group % BLOCKS) * M + tl.arange(0, M)
    exists = own < SHARED
    head = kv_head * SHARED + own
    # The plan was there before the launch that this one may overlap with.
    keys = tl.load(num_keys + request)
    row = tl.load(first_rows + request).to(tl.int64)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(0, keys - WINDOW)
    length = keys - oldest
    share = tl.maximum(tl.cdiv(length, most_splits), (tl.sqrt(length.to(tl.float32)) * PER_ROOT).to(tl.int32))
    share = tl.maximum(LEAST, tl.cdiv(share, N) * N)
    splits = tl.maximum(1, tl.cdiv(length, share))
    if split >= splits:
        return
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    queries = q + row * q_row + head * q_head
    q0 = load_queries(queries, exists, KEY_DIM, 0, K0)
    total = fault_of_rows(q0)
    q1 = q0
    if K1 > 0:
        q1 = load_queries(queries, exists, KEY_DIM, K0, K1)
        total += fault_of_rows(q1)
    table = block_tables + request.to(tl.int64) * table_row
    largest = tl.full((M,), float("-inf"), tl.float32)
    sums0 = tl.zeros((M, V0), tl.float32)
    sums1 = sums0 if V1 == 0 else tl.zeros((M, V1 if V1 > 0 else 16), tl.float32)
    first = oldest + split * share
    last = tl.minimum(first + share, keys)
    for start in tl.range(first, last, N, num_stages=STAGES):
        key = start + tl.arange(0, N)
        seen = key < last
        rows = slots_of(table, key, seen, PAGE) * KV_HEADS + kv_head
        sums0, sums1, largest, total = attend_tile(
            q0, q1, sums0, sums1, largest, total, rows, seen, seen[None, :],
            key_numbers, key_scales, value_numbers, value_scales, scale, softcap,
            KEY_DIM, K0, K1, VALUE_ROW, V0, V1, FORMAT, SOFTCAP, True, REUSE, PRECISION,
        )  # fmt: skip

    largest = largest * in_log2(scale, SOFTCAP)
    if splits == 1:
        results = output + (row * (KV_HEADS * SHARED) + head) * VALUE_DIM
        store_output(results, sums0, sums1, largest, total, sinks + head, exists, VALUE_DIM, V0, V1, SINKS)
    elif SPLIT:
        WIDTH: tl.constexpr = V0 + V1 + 4
        base = partial + (pid * most_splits).to(tl.int64) * (M * WIDTH)
        mine = base + (split * M + tl.arange(0, M)) * WIDTH
        column = tl.arange(0, V0)
        tl.store(mine[:, None] + column[None, :], sums0, mask=exists[:, None])
        if V1 > 0:
            more = V0 + tl.arange(0, V1 if V1 > 0 else 16)
            tl.store(mine[:, None] + more[None, :], sums1, mask=exists[:, None])
        tl.store(mine + (V0 + V1), largest, mask=exists)
        tl.store(mine + (V0 + V1 + 1), total, mask=exists)
        # All of it is written before this program counts as arrived.
        tl.debug_barrier()
        counter = arrivals + request * arrival_row + group
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.store(counter, 0)
            _put_together(
                base, splits, row, kv_head, group % BLOCKS, sinks, output,
                SHARED, KV_HEADS, VALUE_DIM, V0, V1, SINKS, M, REAL,
            )  # fmt: skip


@triton.jit
def _put_together(
    base, splits, row, kv_head, block, sinks, output,
    SHARED: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, SINKS: tl.constexpr,
    M: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The output of M queries, of which REAL or fewer exist, from the results of `splits` programs."""
    WIDTH: tl.constexpr = V0 + V1 + 4
    lane = tl.arange(0, REAL)
    own = block * M + lane
    exists = own < SHARED
    head = kv_head * SHARED + own
    largest = tl.full((REAL,), float("-inf"), tl.float32)
    total = tl.zeros((REAL,), tl.float32)
    sums0 = tl.zeros((REAL, V0), tl.float32)
    sums1 = sums0 if V1 == 0 else tl.zeros((REAL, V1 if V1 > 0 else 16), tl.float32)
    column = tl.arange(0, V0)
    for split in tl.range(0, splits, num_stages=3 if REAL * V0 <= 4096 else 1):
        theirs = base + (split * M + lane) * WIDTH
        high = tl.load(theirs + (V0 + V1), mask=exists, other=0.0, cache_modifier=".cg")
        part = tl.load(theirs + (V0 + V1 + 1), mask=exists, other=0.0, cache_modifier=".cg")
        top = tl.maximum(largest, high)
        fade, weight = tl.exp2(largest - top), tl.exp2(high - top)
        total = total * fade + part * weight
        values = theirs[:, None] + column[None, :]
        values = tl.load(values, mask=exists[:, None], other=0.0, cache_modifier=".cg")
        sums0 = sums0 * fade[:, None] + values * weight[:, None]
        if V1 > 0:
            more = V0 + tl.arange(0, V1 if V1 > 0 else 16)
            values1 = theirs[:, None] + more[None, :]
            values1 = tl.load(values1, mask=exists[:, None], other=0.0, cache_modifier=".cg")
            sums1 = sums1 * fade[:, None] + values1 * weight[:, None]
        largest = top
    results = output + (row * (KV_HEADS * SHARED) + head) * VALUE_DIM
    store_output(results, sums0, sums1, largest, total, sinks + head, exists, VALUE_DIM, V0, V1, SINKS)
