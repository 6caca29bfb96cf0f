"""Attention of requests with several rows each, chunks of prompts, all in one launch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.device_plan import TILE_ROWS, DeviceAttentionPlan
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
from moebius_kernels.triton.targets import overlapping


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """`rows` of one head, which divide TILE_ROWS, and `keys` at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tiling(key_dim: int, itemsize: int, windowed: bool, in_keys: bool) -> PrefillTiling:
    """What was fastest on an H200 with prompts of 8192 tokens."""
    if itemsize == 4:
        return PrefillTiling(32, 32 if key_dim <= 256 else 16, 4, 2)
    if key_dim <= 64:
        return PrefillTiling(64 if windowed else 128, 64, 4, 3)
    if key_dim <= 128:
        return PrefillTiling(128, 128, 8, 3)
    if key_dim <= 256:
        return PrefillTiling(128, 64, 8, 3)
    # Shared memory decides; values in keys take none.
    return PrefillTiling(64, 64 if in_keys else 32, 8, 2)


def prefill_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: DeviceAttentionPlan,
    output: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tiling: PrefillTiling | None = None,
) -> None:
    """Writes the rows of the plan's tiles to `output` [T, heads, Dv]."""
    keys, values = kv_pages.keys, kv_pages.values or kv_pages.keys
    heads = q.shape[1]
    tiling = tiling or prefill_tiling(
        keys.dim, q.dtype.itemsize, plan.window is not None, kv_pages.values is None
    )
    parts = TILE_ROWS // tiling.rows
    k0, k1 = widths(keys.dim)
    v0, v1 = widths(kv_pages.value_dim)
    launch(
        _prefill,
        (plan.tiles.shape[0] * parts * heads,),
        q, keys.numbers, scales_of(keys), values.numbers, scales_of(values), q if sinks is None else sinks,
        output,
        plan.block_tables, plan.first_rows, plan.num_rows, plan.num_keys, plan.tiles,
        scale, softcap or 0.0, q.stride(0), q.stride(1), plan.block_tables.stride(0),
        HEADS=heads, KV_HEADS=kv_pages.kv_heads, PARTS=parts, KEY_DIM=keys.dim, K0=k0, K1=k1,
        VALUE_DIM=kv_pages.value_dim, VALUE_ROW=values.dim, V0=v0, V1=v1, PAGE=plan.page_size,
        WINDOW=plan.window or 0, FORMAT=FORMAT_CODES[keys.format], SINKS=sinks is not None,
        SOFTCAP=softcap is not None,
        REUSE=kv_pages.values is None and v1 == 0 and v0 == k0 == kv_pages.value_dim,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        M=tiling.rows, N=tiling.keys, STAGES=tiling.stages,
        num_warps=tiling.warps, **overlapping(q),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["table_row"])
def _prefill(
    q, key_numbers, key_scales, value_numbers, value_scales, sinks, output,
    block_tables, first_rows, num_rows, num_keys, tiles,
    scale, softcap, q_row, q_head, table_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PARTS: tl.constexpr, KEY_DIM: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_ROW: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, FORMAT: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    REUSE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """M rows of one request, one head. The heads of a tile come one after another: they share keys in L2."""
    pid = tl.program_id(0)
    head = pid % HEADS
    # The later parts of a tile see more keys: first.
    part = PARTS - 1 - (pid // HEADS) % PARTS
    tile = pid // (HEADS * PARTS)
    kv_head = head // (HEADS // KV_HEADS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1) + part * M
    rows_here = tl.load(num_rows + request)
    if first >= rows_here:
        return
    keys = tl.load(num_keys + request)
    index = first + tl.arange(0, M)
    exists = index < rows_here
    row = tl.load(first_rows + request).to(tl.int64) + index
    position = keys - rows_here + index
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

    # Keys from `oldest` on; up to `shared` all rows see all of them, from there on up to `end` it depends.
    start = keys - rows_here + first
    end = tl.minimum(keys, start + M)
    if WINDOW > 0:
        oldest = tl.maximum(0, start - WINDOW + 1) // N * N
        shared = oldest
    else:
        oldest = 0
        shared = (start + 1) // N * N
    for at in tl.range(oldest, shared, N, num_stages=STAGES):
        key = at + tl.arange(0, N)
        seen = key < end
        rows = slots_of(table, key, seen, PAGE) * KV_HEADS + kv_head
        sums0, sums1, largest, total = attend_tile(
            q0, q1, sums0, sums1, largest, total, rows, seen, seen[None, :],
            key_numbers, key_scales, value_numbers, value_scales, scale, softcap,
            KEY_DIM, K0, K1, VALUE_ROW, V0, V1, FORMAT, SOFTCAP, False, REUSE, PRECISION,
        )  # fmt: skip
    for at in tl.range(shared, end, N, num_stages=STAGES):
        key = at + tl.arange(0, N)
        seen = key < end
        if WINDOW > 0:
            seen = seen & (key > start - WINDOW)
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        rows = slots_of(table, key, seen, PAGE) * KV_HEADS + kv_head
        sums0, sums1, largest, total = attend_tile(
            q0, q1, sums0, sums1, largest, total, rows, seen, visible,
            key_numbers, key_scales, value_numbers, value_scales, scale, softcap,
            KEY_DIM, K0, K1, VALUE_ROW, V0, V1, FORMAT, SOFTCAP, True, REUSE, PRECISION,
        )  # fmt: skip
    results = output + (row * HEADS + head) * VALUE_DIM
    largest = largest * in_log2(scale, SOFTCAP)
    own_sinks = sinks + head + tl.zeros((M,), tl.int32)
    store_output(results, sums0, sums1, largest, total, own_sinks, exists, VALUE_DIM, V0, V1, SINKS)
