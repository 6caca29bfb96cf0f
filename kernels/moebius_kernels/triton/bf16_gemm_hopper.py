"""The experts' product of bf16 activations for Hopper, with a division of labour that Triton does not make.

Four warps fetch; two groups of four multiply, each half of a tile's tokens. Rows of the matrix come by TMA;
rows of x too where they are in the order of the experts (down), else by copies of 16 bytes that gather them
(gate and up): no copy of x is made for each of a token's experts. Groups wait for the fetching warps alone.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.launch import launch
from moebius_kernels.triton.align import Alignment
from moebius_kernels.triton.gemm import Gated, activation_of
from moebius_kernels.triton.hopper_tiles import (
    FETCHING_REGISTERS,
    GATHERED,
    GATHERING,
    MULTIPLYING_REGISTERS,
    REGISTERS,
    STAGES,
    TILE,
    TOKENS,
    multiprocessors,
    row_tiles,
    store_rows,
    tile_of,
)
from moebius_kernels.triton.tile_products import activate

# A step's.
COLUMNS = 64
_TOKENS, _COLUMNS, _ROWS = gl.constexpr(TOKENS), gl.constexpr(COLUMNS), gl.constexpr(128)
_HALF = gl.constexpr(TOKENS // 2)
_TILE_BYTES = gl.constexpr(2 * TOKENS * COLUMNS)
# The same text, in Gluon's language.
_activate = gluon.jit(activate.fn)
_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


def bf16_gemm(
    x: torch.Tensor,
    matrix: StoredMatrix,
    y: torch.Tensor,
    alignment: Alignment,
    *,
    pairs_of_x: int = 0,
    bias: torch.Tensor | None = None,
    gated: Gated | None = None,
) -> None:
    """y[r] = x's row of the pair that is the r-th in the order of the experts, times the pair's matrix.

    x [P, C] bf16 in that order, or, with `pairs_of_x`, [P / pairs_of_x, C] in the tokens' order. matrix bf16
    [S, R, C]. y [P, N] bf16: in the order of the experts where `gated`, else of the pairs. C is a multiple of
    64. Rows of pairs without an expert are not written.
    """
    columns = matrix.shape[-1]
    width = y.shape[1]
    name, limit, alpha = activation_of(gated)
    up = matrix if gated is None else gated.up
    height = 128 if gated is not None else 256
    work = len(alignment.tiles) * -(-width // height)
    weights = (row_tiles(one.parts["data"]) for one in (matrix, up))
    launch(
        _bf16_gemm,
        (min(multiprocessors(y), work),),
        x, x if pairs_of_x else row_tiles(x), *weights, y, y if bias is None else bias,
        alignment.sorted_pairs, alignment.tiles,
        work, matrix.shape[-2], 0 if gated is None else gated.up_row,
        N=width, C=columns, ACTIVATION=name, LIMIT=limit, ALPHA=alpha, BIAS=bias is not None,
        PAIRS_OF_X=pairs_of_x, HEIGHT=height, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


# How much work there is makes no other kernel.
@gluon.jit(do_not_specialize=["work"])
def _bf16_gemm(
    x, x_rows, rows, up_rows, y, bias, sorted_pairs, tiles, work, rows_of_slot, up_row,
    N: gl.constexpr, C: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    BIAS: gl.constexpr, PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    """HEIGHT rows of y at a time. A step takes 64 columns of x and of 256 rows, gate and up rows or only
    these. `x_rows`: the descriptor of x, if its rows are in order."""
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _TOKENS, _COLUMNS], TILE)
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * _ROWS, _COLUMNS], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each thread that gathers says that its copies are there.
        mbarrier.init(full.index(stage), count=1 + GATHERING if PAIRS_OF_X > 0 else 1)
        # Both halves have to be through.
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    places = (tiles, work, rows_of_slot, up_row)
    memory = (x_tiles, w_tiles, full, empty)
    given = (x, x_rows, rows, up_rows, sorted_pairs)
    wanted = (y, bias, sorted_pairs)
    gl.warp_specialize(
        [
            (
                _multiply,
                (0, places, memory, wanted, N, C, ACTIVATION, LIMIT, ALPHA, BIAS, PAIRS_OF_X, HEIGHT),
            ),
            (
                _multiply,
                (1, places, memory, wanted, N, C, ACTIVATION, LIMIT, ALPHA, BIAS, PAIRS_OF_X, HEIGHT),
            ),
            (_fetch, (given, places, memory, N, C, PAIRS_OF_X, HEIGHT)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, FETCHING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _fetch(
    given, places, memory,
    N: gl.constexpr, C: gl.constexpr, PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    tiles, work, rows_of_slot, up_row = places
    x, x_rows, rows, up_rows, sorted_pairs = given
    x_tiles, w_tiles, full, empty = memory
    BLOCKS: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    lane = gl.arange(0, _TOKENS, gl.SliceLayout(1, GATHERED))
    octet = gl.arange(0, _COLUMNS, gl.SliceLayout(0, GATHERED))
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        slot, first, last = tile_of(tiles, item // BLOCKS, item < work)
        if slot >= 0:
            row = slot * rows_of_slot + item % BLOCKS * HEIGHT
            other_row = row + _ROWS if HEIGHT > _ROWS else row + up_row
            if PAIRS_OF_X > 0:
                # Rows beyond the last are read as the last, and not stored.
                pair = gl.load(sorted_pairs + gl.minimum(first + lane, last - 1))
                x_at = x + (pair // PAIRS_OF_X).to(gl.int64)[:, None] * C + octet[None, :]
            for group in range(C // _COLUMNS):
                stage = step % STAGES
                # At first a stage is empty, as if a round before this one had been through.
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                ready = full.index(stage)
                column = group * _COLUMNS
                mbarrier.expect(ready, (2 if PAIRS_OF_X > 0 else 3) * _TILE_BYTES)
                w = w_tiles.index(stage)
                tma.async_copy_global_to_shared(rows, [row, column], ready, w.slice(0, _ROWS, 0))
                tma.async_copy_global_to_shared(up_rows, [other_row, column], ready, w.slice(_ROWS, _ROWS, 0))
                if PAIRS_OF_X > 0:
                    async_copy.async_copy_global_to_shared(x_tiles.index(stage), x_at + column)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                else:
                    tma.async_copy_global_to_shared(x_rows, [first, column], ready, x_tiles.index(stage))
                step += 1


@gluon.jit
def _multiply(
    half: gl.constexpr, places, memory, wanted,
    N: gl.constexpr, C: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    BIAS: gl.constexpr, PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    """Of each tile the first 64 tokens, or the others."""
    tiles, work, _, _ = places
    x_tiles, w_tiles, full, empty = memory
    BLOCKS: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    STEPS: gl.constexpr = C // _COLUMNS
    step = gl.to_tensor(0)
    slot, first, last = tile_of(tiles, gl.program_id(0) // BLOCKS, True)
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        # What the next tile is, is known when it is wanted.
        next = item + gl.num_programs(0)
        next_slot, next_first, next_last = tile_of(tiles, next // BLOCKS, next < work)
        if slot >= 0:
            if first + half * _HALF < last:
                total = gl.full([_HALF, 2 * _ROWS], 0.0, gl.float32, _MMA)
                for group in range(STEPS):
                    stage = step % STAGES
                    mbarrier.wait(full.index(stage), step // STAGES & 1)
                    if PAIRS_OF_X > 0:
                        # Copies of the gathering threads are not the tensor cores' own.
                        fence_async_shared()
                    a = x_tiles.index(stage).slice(half * _HALF, _HALF, 0)
                    w = w_tiles.index(stage).permute((1, 0))
                    total = warpgroup_mma(a, w, total, is_async=True)
                    # The step before this one is over.
                    total = warpgroup_mma_wait(1, (total,))
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=group > 0)
                    step += 1
                total = warpgroup_mma_wait(0, (total,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
                _finish(
                    first + half * _HALF, last, slot, item % BLOCKS * HEIGHT, total, wanted,
                    N, ACTIVATION, LIMIT, ALPHA, BIAS,
                )  # fmt: skip
            else:
                for _ in range(STEPS):
                    stage = step % STAGES
                    mbarrier.wait(full.index(stage), step // STAGES & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    step += 1
        slot, first, last = next_slot, next_first, next_last


@gluon.jit
def _finish(
    first, last, slot, column, total, wanted,
    N: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    y, bias, sorted_pairs = wanted
    total = total.reshape([_HALF, 2, _ROWS]).permute((0, 2, 1))
    one, other = total.split()
    if ACTIVATION != "":
        if BIAS:
            n = column + gl.arange(0, _ROWS, gl.SliceLayout(0, one.type.layout))
            at = bias + slot.to(gl.int64) * 2 * N + n
            one += gl.load(at, n < N, 0.0).to(gl.float32)[None, :]
            other += gl.load(at + N, n < N, 0.0).to(gl.float32)[None, :]
        one = _activate(one, other, ACTIVATION, LIMIT, ALPHA)
        store_rows(y, sorted_pairs, first, last, column, one.to(gl.bfloat16), N, _ROWS, True)
    else:
        store_rows(y, sorted_pairs, first, last, column, one.to(gl.bfloat16), N, _ROWS, False)
        store_rows(y, sorted_pairs, first, last, column + _ROWS, other.to(gl.bfloat16), N, _ROWS, False)
