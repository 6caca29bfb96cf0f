"""The experts' product of bf16 activations and codes in words for Hopper, with a division of labour.

Four warps fetch: codes by TMA, factors and the rows of tokens by copies that gather them, rows in the order
of the experts by TMA. Two groups of four expand codes in registers, where the tensor cores read them, and
multiply; each has half of a tile's rows of the matrix, so that one expands while products of the other run.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.launch import launch
from moebius_kernels.triton.align import Alignment
from moebius_kernels.triton.decode import accumulator_factor
from moebius_kernels.triton.decode_words import columns_of_word, words_of_row
from moebius_kernels.triton.gemm import Gated, activation_of, layout_for
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
from moebius_kernels.triton.hopper_words import chunks, numbers
from moebius_kernels.triton.tile_products import activate

# Of a step: two of x's swizzled tiles.
COLUMNS = 128
_TOKENS, _HALF, _ROWS = gl.constexpr(TOKENS), gl.constexpr(TOKENS // 2), gl.constexpr(128)
_SHARE = gl.constexpr(64)
_COLUMNS, _CHUNK, _WORDS = gl.constexpr(COLUMNS), gl.constexpr(COLUMNS // 2), gl.constexpr(COLUMNS // 8)
# The same text, in Gluon's language.
_activate = gluon.jit(activate.fn)
_W_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_X_BYTES, _W_BYTES = gl.constexpr(2 * TOKENS * 64), gl.constexpr(128 * COLUMNS // 2)


def words_gemm(
    x: torch.Tensor,
    matrix: StoredMatrix,
    y: torch.Tensor,
    alignment: Alignment,
    *,
    pairs_of_x: int = 0,
    bias: torch.Tensor | None = None,
    gated: Gated | None = None,
) -> None:
    """As `bf16_gemm_hopper.bf16_gemm`, the matrix as `E2m1Words` or `IntWords`; C is a multiple of 64."""
    columns = matrix.shape[-1]
    width = y.shape[1]
    layout = layout_for(matrix)
    name, limit, alpha = activation_of(gated)
    up = matrix if gated is None else gated.up
    height = 128 if gated is not None else 256
    work = len(alignment.tiles) * -(-width // height)
    scales = (one.parts["scale"].view(torch.int32) for one in (matrix, up))
    row_scales = (one.parts[layout.row_scale] if layout.row_scale else y for one in (matrix, up))
    codes = (_tiles_of(one.parts["data"].view(torch.int32)) for one in (matrix, up))
    launch(
        _words_gemm,
        (min(multiprocessors(y), work),),
        x, x if pairs_of_x else row_tiles(x), *codes, *scales, *row_scales, y, y if bias is None else bias,
        alignment.sorted_pairs, alignment.tiles,
        work, matrix.shape[-2], 0 if gated is None else gated.up_row,
        N=width, C=columns, CODE=layout.code, SCALES=layout.scales, GROUP=layout.group,
        ROW_SCALE=layout.row_scale is not None, ACTIVATION=name, LIMIT=limit, ALPHA=alpha,
        BIAS=bias is not None, PAIRS_OF_X=pairs_of_x, HEIGHT=height, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


def _tiles_of(codes: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes.view(-1, codes.shape[-1]), [128, COLUMNS // 8], _W_TILE.value)


# How much work there is makes no other kernel.
@gluon.jit(do_not_specialize=["work"])
def _words_gemm(
    x, x_rows, codes, up_codes, scale, up_scale, row_scale, up_row_scale, y, bias, sorted_pairs, tiles,
    work, rows_of_slot, up_row,
    N: gl.constexpr, C: gl.constexpr, CODE: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr,
    ROW_SCALE: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    BIAS: gl.constexpr, PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    """HEIGHT rows of y at a time. A step takes 128 columns of x and of 256 rows, gate and up rows or only
    these. `x_rows`: the descriptor of x, if its rows are in order."""
    # Columns that a word of factors is for, and words that a row has for a step.
    OF_WORD: gl.constexpr = columns_of_word(CODE, SCALES, GROUP)
    FACTORS: gl.constexpr = _COLUMNS // OF_WORD if OF_WORD < _COLUMNS else 1
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, _TOKENS, _CHUNK], TILE)
    w_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * _ROWS, _WORDS], _W_TILE)
    s_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * _ROWS, FACTORS], _PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each thread that gathers says that its copies are there.
        mbarrier.init(full.index(stage), count=1 + GATHERING)
        # Both groups have to be through.
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    places = (tiles, work, rows_of_slot, up_row)
    memory = (x_tiles, w_tiles, s_tiles, full, empty)
    given = (x, x_rows, codes, up_codes, scale, up_scale, sorted_pairs)
    wanted = (y, row_scale, up_row_scale, bias, sorted_pairs)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, places, memory, wanted,
                    N, C, CODE, SCALES, GROUP, ROW_SCALE, ACTIVATION, LIMIT, ALPHA, BIAS, PAIRS_OF_X, HEIGHT,
                ),
            ),
            (
                _multiply,
                (
                    1, places, memory, wanted,
                    N, C, CODE, SCALES, GROUP, ROW_SCALE, ACTIVATION, LIMIT, ALPHA, BIAS, PAIRS_OF_X, HEIGHT,
                ),
            ),
            (_fetch, (given, places, memory, N, C, OF_WORD, FACTORS, PAIRS_OF_X, HEIGHT)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, FETCHING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _fetch(
    given, places, memory,
    N: gl.constexpr, C: gl.constexpr, OF_WORD: gl.constexpr, FACTORS: gl.constexpr,
    PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    tiles, work, rows_of_slot, up_row = places
    x, x_rows, codes, up_codes, scale, up_scale, sorted_pairs = given
    x_tiles, w_tiles, s_tiles, full, empty = memory
    BLOCKS: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    # Words of factors that a row has.
    WIDTH: gl.constexpr = words_of_row(C, OF_WORD)
    BESIDE: gl.constexpr = gl.BlockedLayout([1, FACTORS], [32, 1], [4, 1], [1, 0])
    lane = gl.arange(0, _TOKENS, gl.SliceLayout(1, GATHERED))
    octet = gl.arange(0, _CHUNK, gl.SliceLayout(0, GATHERED))
    r = gl.arange(0, _ROWS, gl.SliceLayout(1, BESIDE))
    word = gl.arange(0, FACTORS, gl.SliceLayout(0, BESIDE))
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        slot, first, last = tile_of(tiles, item // BLOCKS, item < work)
        if slot >= 0:
            n = item % BLOCKS * HEIGHT
            row = slot * rows_of_slot + n
            other_row = row + _ROWS if HEIGHT > _ROWS else row + up_row
            # Rows beyond the last are read as the last, and not stored.
            own = slot * rows_of_slot + gl.minimum(n + r, N - 1)
            next = slot * rows_of_slot + gl.minimum(n + _ROWS + r, N - 1)
            other = next if HEIGHT > _ROWS else own + up_row
            scale_at = scale + own.to(gl.int64)[:, None] * WIDTH + word[None, :]
            other_scale_at = up_scale + other.to(gl.int64)[:, None] * WIDTH + word[None, :]
            if PAIRS_OF_X > 0:
                pair = gl.load(sorted_pairs + gl.minimum(first + lane, last - 1))
                x_at = x + (pair // PAIRS_OF_X).to(gl.int64)[:, None] * C + octet[None, :]
            for group in range((C + _COLUMNS - 1) // _COLUMNS):
                stage = step % STAGES
                # At first a stage is empty, as if a round before this one had been through.
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                ready = full.index(stage)
                column = group * _COLUMNS
                w, s = w_tiles.index(stage), s_tiles.index(stage)
                if PAIRS_OF_X > 0:
                    mbarrier.expect(ready, 2 * _W_BYTES)
                else:
                    mbarrier.expect(ready, 2 * _W_BYTES + 2 * _X_BYTES)
                tma.async_copy_global_to_shared(codes, [row, column // 8], ready, w.slice(0, _ROWS, 0))
                tma.async_copy_global_to_shared(
                    up_codes, [other_row, column // 8], ready, w.slice(_ROWS, _ROWS, 0)
                )
                for chunk in gl.static_range(2):
                    x_tile = x_tiles.index(2 * stage + chunk)
                    at = column + chunk * _CHUNK
                    if PAIRS_OF_X == 0:
                        tma.async_copy_global_to_shared(x_rows, [first, at], ready, x_tile)
                    elif C % _COLUMNS == 0:
                        async_copy.async_copy_global_to_shared(x_tile, x_at + at)
                    else:
                        async_copy.async_copy_global_to_shared(x_tile, x_at + at, (at + octet < C)[None, :])
                word_at = column // OF_WORD
                async_copy.async_copy_global_to_shared(s.slice(0, _ROWS, 0), scale_at + word_at)
                async_copy.async_copy_global_to_shared(s.slice(_ROWS, _ROWS, 0), other_scale_at + word_at)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                step += 1


@gluon.jit
def _multiply(
    share: gl.constexpr, places, memory, wanted,
    N: gl.constexpr, C: gl.constexpr, CODE: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr,
    ROW_SCALE: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    BIAS: gl.constexpr, PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    """Of each tile half of the rows: of gate and up rows 64 each, else 128."""
    tiles, work, rows_of_slot, up_row = places
    _, _, _, full, empty = memory
    BLOCKS: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    STEPS: gl.constexpr = (C + _COLUMNS - 1) // _COLUMNS
    step = gl.to_tensor(0)
    slot, first, last = tile_of(tiles, gl.program_id(0) // BLOCKS, True)
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        # What the next tile is, is known when it is wanted.
        next = item + gl.num_programs(0)
        next_slot, next_first, next_last = tile_of(tiles, next // BLOCKS, next < work)
        if slot >= 0:
            begin = slot * rows_of_slot
            column = item % BLOCKS * HEIGHT
            if column + share * (HEIGHT // 2) >= N:
                # Rows beyond the last: the other group has the tensor cores for itself.
                for ahead in range(STEPS):
                    mbarrier.wait(full.index((step + ahead) % STAGES), (step + ahead) // STAGES & 1)
                    mbarrier.arrive(empty.index((step + ahead) % STAGES), count=1)
            elif last - first > _HALF:
                _tile(
                    share, step, begin, up_row, slot, first, last, column, memory, wanted,
                    N, STEPS, CODE, SCALES, GROUP, ROW_SCALE, ACTIVATION, LIMIT, ALPHA, BIAS, PAIRS_OF_X,
                    HEIGHT, _TOKENS,
                )  # fmt: skip
            else:
                _tile(
                    share, step, begin, up_row, slot, first, last, column, memory, wanted,
                    N, STEPS, CODE, SCALES, GROUP, ROW_SCALE, ACTIVATION, LIMIT, ALPHA, BIAS, PAIRS_OF_X,
                    HEIGHT, _HALF,
                )  # fmt: skip
            step += STEPS
        slot, first, last = next_slot, next_first, next_last


@gluon.jit
def _tile(
    share: gl.constexpr, step, begin, up_row, slot, first, last, column, memory, wanted,
    N: gl.constexpr, STEPS: gl.constexpr, CODE: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr,
    ROW_SCALE: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    BIAS: gl.constexpr, PAIRS_OF_X: gl.constexpr, HEIGHT: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """TOKENS of the tile, which has no more."""
    x_tiles, w_tiles, s_tiles, full, empty = memory
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    # Where the group's rows are in a tile of the matrix.
    ONE: gl.constexpr = share * (HEIGHT // 2)
    OTHER: gl.constexpr = ONE + (_ROWS if HEIGHT == _ROWS else _SHARE)
    one = gl.full([_SHARE, TOKENS], 0.0, gl.float32, MMA)
    other = gl.full([_SHARE, TOKENS], 0.0, gl.float32, MMA)
    for _ in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if PAIRS_OF_X > 0:
            # Copies of the gathering threads are not the tensor cores' own.
            fence_async_shared()
        w, s = w_tiles.index(stage), s_tiles.index(stage)
        own = chunks(w, s, ONE, CODE, SCALES, GROUP)
        others = chunks(w, s, OTHER, CODE, SCALES, GROUP)
        early = x_tiles.index(2 * stage).slice(0, TOKENS, 0).permute((1, 0))
        late = x_tiles.index(2 * stage + 1).slice(0, TOKENS, 0).permute((1, 0))
        # Products read their registers until they are over.
        a = numbers(own[0], CODE, SCALES, MMA)
        one = warpgroup_mma(a, early, one, is_async=True)
        b = numbers(others[0], CODE, SCALES, MMA)
        other = warpgroup_mma(b, early, other, is_async=True)
        one, a = warpgroup_mma_wait(1, (one, a))
        a = numbers(own[1], CODE, SCALES, MMA)
        one = warpgroup_mma(a, late, one, is_async=True)
        other, b = warpgroup_mma_wait(1, (other, b))
        b = numbers(others[1], CODE, SCALES, MMA)
        other = warpgroup_mma(b, late, other, is_async=True)
        one, other, a, b = warpgroup_mma_wait(0, (one, other, a, b))
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    y, row_scale, up_row_scale, bias, sorted_pairs = wanted
    r = gl.arange(0, _SHARE, gl.SliceLayout(1, MMA)) + ONE
    n = column + r
    FACTOR: gl.constexpr = accumulator_factor(CODE, True)
    if ACTIVATION != "":
        one = _scaled(one, row_scale, begin, n, bias, slot * 2 * N, N, FACTOR, ROW_SCALE, BIAS)
        up_begin = begin + up_row
        up_bias = slot * 2 * N + N
        other = _scaled(other, up_row_scale, up_begin, n, bias, up_bias, N, FACTOR, ROW_SCALE, BIAS)
        one = _activate(one, other, ACTIVATION, LIMIT, ALPHA).to(gl.bfloat16).permute((1, 0))
        store_rows(y, sorted_pairs, first, last, column + ONE, one, N, _SHARE, True)
    else:
        one = _scaled(one, row_scale, begin, n, bias, 0, N, FACTOR, ROW_SCALE, False)
        one = one.to(gl.bfloat16).permute((1, 0))
        store_rows(y, sorted_pairs, first, last, column + ONE, one, N, _SHARE, False)
        other = _scaled(other, row_scale, begin, n + _SHARE, bias, 0, N, FACTOR, ROW_SCALE, False)
        other = other.to(gl.bfloat16).permute((1, 0))
        store_rows(y, sorted_pairs, first, last, column + OTHER, other, N, _SHARE, False)


@gluon.jit
def _scaled(
    total, row_scale, begin, n, bias, bias_begin, N: gl.constexpr,
    FACTOR: gl.constexpr, ROW_SCALE: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    m = gl.minimum(n, N - 1)
    if ROW_SCALE:
        total *= (gl.load(row_scale + begin + m) * FACTOR)[:, None]
    else:
        total *= FACTOR
    if BIAS:
        total += gl.load(bias + bias_begin + m).to(gl.float32)[:, None]
    return total
