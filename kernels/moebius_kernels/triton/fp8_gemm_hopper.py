"""The product of `fp8_gemm.py` for Hopper, with a division of labour that Triton does not make by itself.

One warp fetches tiles; two groups of four warps multiply, each half of a tile's tokens. They wait for the
fetching warp alone and not for each other, so that one's tensor cores work while the other scales and adds.
A program takes one tile after another: what the next needs is fetched while the last is written.
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
from moebius_kernels.formats.rounded_activations import GROUP
from moebius_kernels.launch import launch
from moebius_kernels.triton.align import Alignment
from moebius_kernels.triton.fp8_activations import Rounded, round_group
from moebius_kernels.triton.gemm import Gated, activation_of
from moebius_kernels.triton.hopper_tiles import REGISTERS, multiprocessors, tile_of
from moebius_kernels.triton.targets import ceil_div, generation_of
from moebius_kernels.triton.tile_products import activate
from moebius_kernels.triton.tiling import Tiling

_GROUP = gl.constexpr(GROUP)
TOKENS = 128
_TOKENS = gl.constexpr(TOKENS)
_HALF = gl.constexpr(TOKENS // 2)
# The same text, in Gluon's language.
_activate, _round_group = gluon.jit(activate.fn), gluon.jit(round_group.fn)
_TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([TOKENS, GROUP], gl.float8e4nv))
_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 32]))
_BYTES = gl.constexpr(TOKENS * GROUP)
# Of a thread, after those that the kernel begins with have been shared out again.
_MULTIPLYING_REGISTERS, _FETCHING_REGISTERS = gl.constexpr(216), gl.constexpr(72)
_LANES = gl.constexpr(32)
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def serves(x: Rounded, matrix: StoredMatrix, tiling: Tiling) -> bool:
    """Instead of `fp8_gemm.fp8_gemm`: tiles of 128 tokens, factors of blocks, on Hopper."""
    by_block = matrix.format.block_columns is not None  # type: ignore[attr-defined]
    return generation_of(x.codes) == 9 and by_block and tiling.tokens == TOKENS


def fp8_gemm(
    x: Rounded,
    matrix: StoredMatrix,
    y: torch.Tensor | Rounded,
    alignment: Alignment,
    tiling: Tiling,
    gated: Gated | None = None,
) -> None:
    """As `fp8_gemm.fp8_gemm`; of `tiling`, only the stages count."""
    columns = matrix.shape[-1]
    output, factors = (y.codes, y.scale) if isinstance(y, Rounded) else (y, x.scale)
    name, limit, alpha = activation_of(gated)
    up = matrix if gated is None else gated.up
    width = output.shape[1]
    height = GROUP if gated is not None else 2 * GROUP
    work = len(alignment.tiles) * ceil_div(width, height)
    scales = x.scale, matrix.parts["scale"], up.parts["scale"]
    tiled = (_tiles_of(codes) for codes in (x.codes, matrix.parts["data"], up.parts["data"]))
    launch(
        _fp8_gemm,
        (min(multiprocessors(output), work),),
        *scales, *tiled, output, factors, alignment.sorted_pairs, alignment.tiles,
        work, matrix.shape[-2], 0 if gated is None else gated.up_row, x.scale.stride(1),
        N=width, C=columns, ACTIVATION=name, LIMIT=limit, ALPHA=alpha, ROUND=isinstance(y, Rounded),
        HEIGHT=height, STAGES=tiling.stages, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


def _tiles_of(codes: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes.view(-1, codes.shape[-1]), [TOKENS, GROUP], _TILE.value)


# How much work there is makes no other kernel.
@gluon.jit(do_not_specialize=["work"])
def _fp8_gemm(
    x_scale, scale, up_scale, x, codes, up_codes, y, y_scale, sorted_pairs, tiles,
    work, rows_of_slot, up_row, pairs,
    N: gl.constexpr, C: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    ROUND: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`fp8_gemm._fp8_gemm`, HEIGHT rows of y at a time. A step takes 128 columns of x and of two matrices."""
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _TOKENS, _GROUP], _TILE)
    w_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _GROUP, _GROUP], _TILE)
    other_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _GROUP, _GROUP], _TILE)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, _TOKENS], _LINE)
    scales = gl.allocate_shared_memory(gl.float32, [2 * STAGES, _LANES], _LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each lane that fetches says that its factors are there.
        mbarrier.init(full.index(stage), count=1 + _LANES)
        # Both halves have to be through.
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    places = (tiles, work, rows_of_slot, up_row, pairs)
    memory = (x_tiles, w_tiles, other_tiles, factors, scales, full, empty)
    given = (x_scale, scale, up_scale, x, codes, up_codes)
    wanted = (y, y_scale, sorted_pairs, pairs)
    gl.warp_specialize(
        [
            (_multiply, (0, places, memory, wanted, N, C, ACTIVATION, LIMIT, ALPHA, ROUND, HEIGHT, STAGES)),
            (_multiply, (1, places, memory, wanted, N, C, ACTIVATION, LIMIT, ALPHA, ROUND, HEIGHT, STAGES)),
            (_fetch, (given, places, memory, N, C, HEIGHT, STAGES)),
        ],
        [4, 1],
        [_MULTIPLYING_REGISTERS, _FETCHING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _fetch(
    given, places, memory,
    N: gl.constexpr, C: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles, work, rows_of_slot, up_row, pairs = places
    x_scale, scale, up_scale, x, codes, up_codes = given
    x_tiles, w_tiles, other_tiles, factors, scales, full, empty = memory
    BLOCKS: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    GROUPS: gl.constexpr = C // _GROUP
    BESIDE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    token = gl.arange(0, _TOKENS, BESIDE)
    lane = gl.arange(0, _LANES, BESIDE)
    blocks_of_slot = (rows_of_slot + _GROUP - 1) // _GROUP
    step = gl.to_tensor(0)
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        slot, first, last = tile_of(tiles, item // BLOCKS, item < work)
        if slot >= 0:
            # Tokens beyond the last have the factor of the last, and are not stored.
            x_scale_at = x_scale + gl.minimum(first + token, last - 1)
            block = item % BLOCKS
            scale_at = (slot * blocks_of_slot + block * (HEIGHT // _GROUP)) * GROUPS
            if HEIGHT > _GROUP:
                # Of the last rows there may be but 128.
                other_scale_at = gl.where(block * HEIGHT + _GROUP < N, scale_at + GROUPS, scale_at)
            else:
                other_scale_at = (slot * blocks_of_slot + block + up_row // _GROUP) * GROUPS
            # All lanes have the same.
            own_at, others_at = scale + scale_at + 0 * lane, up_scale + other_scale_at + 0 * lane
            row = slot * rows_of_slot + item % BLOCKS * HEIGHT
            other_row = row + _GROUP if HEIGHT > _GROUP else row + up_row
            for group in range(GROUPS):
                stage = step % STAGES
                # At first a stage is empty, as if a round before this one had been through.
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                ready = full.index(stage)
                mbarrier.expect(ready, 3 * _BYTES)
                column = group * _GROUP
                tma.async_copy_global_to_shared(x, [first, column], ready, x_tiles.index(stage))
                tma.async_copy_global_to_shared(codes, [row, column], ready, w_tiles.index(stage))
                tma.async_copy_global_to_shared(
                    up_codes, [other_row, column], ready, other_tiles.index(stage)
                )
                async_copy.async_copy_global_to_shared(factors.index(stage), x_scale_at + group * pairs)
                async_copy.async_copy_global_to_shared(scales.index(2 * stage), own_at + group)
                async_copy.async_copy_global_to_shared(scales.index(2 * stage + 1), others_at + group)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                step += 1


@gluon.jit
def _multiply(
    half: gl.constexpr, places, memory, wanted,
    N: gl.constexpr, C: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    ROUND: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of each tile the first 64 tokens, or the others."""
    tiles, work, _, _, _ = places
    x_tiles, w_tiles, other_tiles, factors, scales, full, empty = memory
    BLOCKS: gl.constexpr = (N + HEIGHT - 1) // HEIGHT
    GROUPS: gl.constexpr = C // _GROUP
    lane = gl.arange(0, _HALF, gl.SliceLayout(1, _MMA)) + half * _HALF
    step = gl.to_tensor(0)
    slot, first, last = tile_of(tiles, gl.program_id(0) // BLOCKS, True)
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        # What the next tile is, is known when it is wanted.
        next = item + gl.num_programs(0)
        next_slot, next_first, next_last = tile_of(tiles, next // BLOCKS, next < work)
        if slot >= 0:
            block = item % BLOCKS
            total = gl.full([_HALF, _GROUP], 0.0, gl.float32, _MMA)
            other = gl.full([_HALF, _GROUP], 0.0, gl.float32, _MMA)
            nothing = gl.full([_HALF, _GROUP], 0.0, gl.float32, _MMA)
            for _ in range(GROUPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                factor = factors.index(stage).slice(half * _HALF, _HALF, 0).load(gl.SliceLayout(1, _MMA))
                own = scales.index(2 * stage).slice(0, 1, 0).load(gl.SliceLayout(1, _MMA))
                others = scales.index(2 * stage + 1).slice(0, 1, 0).load(gl.SliceLayout(1, _MMA))
                a = x_tiles.index(stage).slice(half * _HALF, _HALF, 0)
                w = w_tiles.index(stage).permute((1, 0))
                product = warpgroup_mma(a, w, nothing, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, (product,))
                total += product * (factor * own)[:, None]
                w = other_tiles.index(stage).permute((1, 0))
                product = warpgroup_mma(a, w, nothing, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, (product,))
                mbarrier.arrive(empty.index(stage), count=1)
                other += product * (factor * others)[:, None]
                step += 1
            place = first + lane
            _finish(
                place, place < last, block * HEIGHT, total, other, wanted,
                N, ACTIVATION, LIMIT, ALPHA, ROUND, HEIGHT,
            )  # fmt: skip
        slot, first, last = next_slot, next_first, next_last


@gluon.jit
def _finish(
    place, inside, column, total, other, wanted,
    N: gl.constexpr, ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    ROUND: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    y, y_scale, sorted_pairs, pairs = wanted
    if ACTIVATION != "":
        total = _activate(total, other, ACTIVATION, LIMIT, ALPHA)
    if ROUND:
        codes, factor = _round_group(total, False)
        gl.store(y_scale + column // _GROUP * pairs + place, factor, inside)
        _store(y, place, inside, column, codes, N, 16)
    else:
        pair = gl.load(sorted_pairs + place, inside, 0)
        _store(y, pair, inside, column, total.to(y.dtype.element_ty), N, 8)
        if HEIGHT > _GROUP:
            _store(y, pair, inside, column + _GROUP, other.to(y.dtype.element_ty), N, 8)


@gluon.jit
def _store(y, row, inside, column, value, N: gl.constexpr, VECTOR: gl.constexpr):
    """VECTOR numbers, which are 16 bytes, at a time."""
    ACROSS: gl.constexpr = _GROUP // VECTOR
    BESIDE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    value = gl.convert_layout(value, BESIDE)
    row = gl.convert_layout(gl.where(inside, row, -1), gl.SliceLayout(1, BESIDE))
    n = column + gl.arange(0, _GROUP, gl.SliceLayout(0, BESIDE))
    at = row.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(y + at, value, (row >= 0)[:, None] & (n < N)[None, :])
