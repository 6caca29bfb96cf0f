"""The attention of `prefill_attention.py` for Hopper, with a division of labour.

One warp fetches pages of keys and values by TMA. Two groups of four warps have 64 rows of a head each: one
has its exponentials while products of the other run. And in each group values are added while scores of the
next keys become weights.
"""

from math import e, log2

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moebius_kernels.device_plan import TILE_ROWS, DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.launch import launch
from moebius_kernels.triton.hopper_scores import KEYS, ROWS, SCORES, numbers_of, pairs_of, weigh
from moebius_kernels.triton.hopper_tiles import REGISTERS, multiprocessors, store_rows

# Columns of a swizzled row, which has 128 bytes.
_LINE = gl.constexpr(64)
_TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
# Of keys and of values each.
_STAGES = gl.constexpr(2)
# Of a thread, after those that the kernel begins with have been shared out again.
_MULTIPLYING_REGISTERS, _FETCHING_REGISTERS = gl.constexpr(232), gl.constexpr(40)
_UNALIGNED = ["sinks", "block_tables", "first_rows", "num_rows", "num_keys", "tiles"]
_LOG2_E = gl.constexpr(log2(e))


def prefill_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: DeviceAttentionPlan,
    output: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    """Writes the rows of the plan's tiles to `output` [T, heads, D]. All of it is bf16, D a multiple of 64;
    pages have a power of two of tokens, at least 8."""
    assert kv_pages.values is not None
    heads, dim = q.shape[1:]
    work = plan.tiles.shape[0] * heads
    if not work:
        return
    box = min(plan.page_size, KEYS.value)
    keys, values = (
        _boxes(rows.numbers.view(-1, kv_pages.kv_heads * dim), box)
        for rows in (kv_pages.keys, kv_pages.values)
    )
    launch(
        _prefill_hopper,
        (min(multiprocessors(q), work),),
        output, _boxes(q.flatten(1), TILE_ROWS // 2), keys, values, output if sinks is None else sinks,
        plan.block_tables, plan.first_rows, plan.num_rows, plan.num_keys, plan.tiles,
        work, scale * log2(e), plan.block_tables.stride(0),
        HEADS=heads, KV_HEADS=kv_pages.kv_heads, D=dim, PAGE=plan.page_size, BOX=box,
        WINDOW=plan.window or 0, SINKS=sinks is not None, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


def _boxes(rows: torch.Tensor, count: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [count, 64], _TILE.value)


# Neither sizes of a step make other kernels, nor where the numbers of a plan lie: each is loaded by itself.
@gluon.jit(do_not_specialize=["work", "table_row"], do_not_specialize_on_alignment=_UNALIGNED)
def _prefill_hopper(
    output, q, keys, values, sinks, block_tables, first_rows, num_rows, num_keys, tiles,
    work, factor, table_row,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """128 rows of a head at a time, one tile of keys after another, the last ones first. `factor`: scores are
    so many times the products, in units of log 2."""
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, D], _TILE)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, KEYS, D], _TILE)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, KEYS, D], _TILE)
    q_full, q_empty = _barriers(2, 1), _barriers(2, 1)
    k_full, v_full = _barriers(_STAGES, 1), _barriers(_STAGES, 1)
    # Both groups have to be through.
    k_empty, v_empty = _barriers(_STAGES, 2), _barriers(_STAGES, 2)
    fence_async_shared()
    gl.thread_barrier()
    places = (first_rows, num_rows, num_keys, tiles, work)
    memory = ((q_tiles, q_full, q_empty), (k_tiles, k_full, k_empty), (v_tiles, v_full, v_empty))
    given = (q, keys, values, block_tables, table_row)
    wanted = (output, sinks, factor)
    gl.warp_specialize(
        [
            (_multiply, (0, places, memory, wanted, HEADS, D, WINDOW, SINKS)),
            (_multiply, (1, places, memory, wanted, HEADS, D, WINDOW, SINKS)),
            (_fetch, (given, places, memory, HEADS, KV_HEADS, D, PAGE, BOX, WINDOW)),
        ],
        [4, 1],
        [_MULTIPLYING_REGISTERS, _FETCHING_REGISTERS],
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(made.index(index), count=ARRIVALS)
    return made


@gluon.jit
def _place(turn, places, HEADS: gl.constexpr, WINDOW: gl.constexpr):
    """Of a turn's item, if there is one: head, request, row, and the row after its request's last; the first
    row's position, how many keys there are, and the first and the last tile of them that any row sees.

    Items become lighter and lighter: where programs take them in the opposite order every other turn, each
    gets about as much.
    """
    first_rows, num_rows, num_keys, tiles, work = places
    pid, programs = gl.program_id(0), gl.num_programs(0)
    item = turn * programs + pid + (turn & 1) * (programs - 1 - 2 * pid)
    there = item < work
    tile = item // HEADS
    request = gl.load(tiles + 2 * tile, there, 0)
    first = gl.load(tiles + 2 * tile + 1, there, 0)
    rows = gl.load(num_rows + request)
    row = gl.load(first_rows + request) + first
    end = gl.load(num_keys + request)
    start = end - rows + first
    end = gl.minimum(end, start + 2 * ROWS)
    oldest = gl.maximum(0, start - WINDOW + 1) if WINDOW > 0 else gl.to_tensor(0)
    bottom, top = oldest // KEYS, (end - 1) // KEYS
    return there, item % HEADS, request, row, row + rows - first, start, end, bottom, top


@gluon.jit
def _fetch(
    given, places, memory,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    q, keys, values, block_tables, table_row = given
    q_tiles, q_full, q_empty = memory[0]
    k_tiles, k_full, k_empty = memory[1]
    v_tiles, v_full, v_empty = memory[2]
    programs = gl.num_programs(0)
    step = gl.to_tensor(0)
    for turn in range((places[4] + programs - 1) // programs):
        there, head, request, row, _last, start, end, bottom, top = _place(turn, places, HEADS, WINDOW)
        if there:
            for group in gl.static_range(2):
                # At first all is empty, as if a round before this one had been through.
                mbarrier.wait(q_empty.index(group), (turn & 1) ^ 1)
                first = (row + group * ROWS,)
                _copy(q, first, head * D, q_tiles.index(group), q_full.index(group), D, ROWS, ROWS)
            table = block_tables + request.to(gl.int64) * table_row
            column = head // (HEADS // KV_HEADS) * D
            for back in range(top - bottom + 1):
                # What no row sees is read from before the first page, where there are zeros.
                slots = ()
                for box in gl.static_range(KEYS // BOX):
                    key = (top - back) * KEYS + box * BOX
                    seen = key < end
                    if WINDOW > 0:
                        seen = seen & (key + BOX > start - WINDOW + 1)
                    slot = gl.load(table + key // PAGE, seen, -1) * PAGE + key % PAGE
                    slots += (slot,)  # type: ignore[assignment]
                stage, parity = step % _STAGES, (step // _STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), parity)
                _copy(keys, slots, column, k_tiles.index(stage), k_full.index(stage), D, BOX, KEYS)
                mbarrier.wait(v_empty.index(stage), parity)
                _copy(values, slots, column, v_tiles.index(stage), v_full.index(stage), D, BOX, KEYS)
                step += 1


@gluon.jit
def _copy(source, rows, column, tile, ready, D: gl.constexpr, BOX: gl.constexpr, N: gl.constexpr):
    """To a tile of N rows, in boxes of BOX rows and the columns of a line."""
    mbarrier.expect(ready, 2 * N * D)
    lines = tile._reinterpret(gl.bfloat16, [D // _LINE, N, _LINE], _TILE)
    for box in gl.static_range(N // BOX):
        for line in gl.static_range(D // _LINE):
            part = lines.index(line).slice(box * BOX, BOX, 0)
            tma.async_copy_global_to_shared(source, [rows[box], column + line * _LINE], ready, part)


@gluon.jit
def _multiply(
    group: gl.constexpr, places, memory, wanted,
    HEADS: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Of each item the first 64 rows, or the others."""
    q_tiles, q_full, q_empty = memory[0]
    v_tiles, v_full, v_empty = memory[2]
    output, sinks, factor = wanted
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    programs = gl.num_programs(0)
    step = gl.to_tensor(0)
    for turn in range((places[4] + programs - 1) // programs):
        there, head, _request, row, last, start, _end, bottom, top = _place(turn, places, HEADS, WINDOW)
        if there:
            start += group * ROWS
            # All rows see all keys of the tiles from `early` on up to `late`.
            late = gl.minimum(gl.maximum((start + 1) // KEYS, bottom), top)
            early = bottom
            if WINDOW > 0:
                early = (gl.maximum(0, start + ROWS - WINDOW) + KEYS - 1) // KEYS
                early = gl.minimum(gl.maximum(early, bottom), late)
            borders = (top, late, early, bottom)
            mbarrier.wait(q_full.index(group), turn & 1)
            q = q_tiles.index(group)
            # NaN for rows that are not finite, else 0.
            total = gl.convert_layout(gl.sum(q.load(SUMS).to(gl.float32) * 0.0, 1), gl.SliceLayout(1, SCORES))
            largest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            sums = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
            scores = warpgroup_mma_wait(0, (_scores(q, step, memory[1]),))
            mbarrier.arrive(memory[1][2].index(step % _STAGES), count=1)
            weights, largest, total, fade = weigh(scores, largest, total, top, start, factor, True, WINDOW)
            pairs = pairs_of(weights)
            step += 1
            for part in gl.static_range(3 if WINDOW > 0 else 2):
                for back in range(borders[part] - borders[part + 1]):
                    sums, pairs, largest, total, fade = _step(
                        q, sums, pairs, largest, total, fade, borders[part] - 1 - back, step,
                        start, factor, memory, part != 1, WINDOW, D,
                    )  # fmt: skip
                    step += 1
            mbarrier.arrive(q_empty.index(group), count=1)
            stage = (step - 1) % _STAGES
            mbarrier.wait(v_full.index(stage), (step - 1) // _STAGES & 1)
            sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            weights = numbers_of(pairs, gl.DotOperandLayout(0, SUMS, 2))
            sums = warpgroup_mma(weights, v_tiles.index(stage), sums, is_async=True)
            sums, weights = warpgroup_mma_wait(0, (sums, weights))
            mbarrier.arrive(v_empty.index(stage), count=1)
            fade = 1.0 / gl.where(total == 0.0, 1.0, total)
            if SINKS:
                # Scores that have no value.
                sink = gl.load(sinks + head).to(gl.float32) * _LOG2_E
                most = gl.maximum(largest * factor, sink)
                fade = gl.exp2(largest * factor - most)
                fade = fade / (total * fade + gl.exp2(sink - most))
            sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            store_rows(
                output, output, row + group * ROWS, last, head * D, sums.to(gl.bfloat16), HEADS * D, D, True
            )


@gluon.jit
def _scores(q, step, keys):
    """The product of queries and keys, which has begun."""
    k_tiles, k_full, _ = keys
    nothing = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
    stage = step % _STAGES
    mbarrier.wait(k_full.index(stage), step // _STAGES & 1)
    return warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _step(
    q, sums, pairs, largest, total, fade, n, step, start, factor, memory,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Takes tile n of keys. Of the one before it, `sums` have not faded and the values not been added yet."""
    _, keys, values = memory
    v_tiles, v_full, v_empty = values
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    scores = _scores(q, step, keys)
    stage, parity = (step - 1) % _STAGES, (step - 1) // _STAGES & 1
    mbarrier.wait(v_full.index(stage), parity)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    weights = numbers_of(pairs, gl.DotOperandLayout(0, SUMS, 2))
    sums = warpgroup_mma(weights, v_tiles.index(stage), sums, is_async=True)
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(keys[2].index(step % _STAGES), count=1)
    next, largest, total, fade = weigh(scores, largest, total, n, start, factor, MASKED, WINDOW)
    # The assembler would move all of that behind the products, but not beyond a branch.
    mbarrier.wait(v_full.index(stage), parity)
    sums, weights = warpgroup_mma_wait(0, (sums, weights))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return sums, pairs_of(next), largest, total, fade
