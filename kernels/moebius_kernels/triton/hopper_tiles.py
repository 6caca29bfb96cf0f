"""What kernels in Gluon share that take one tile of sorted pairs after another."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Of x, in a tile.
TOKENS = 128
# Rows of x in shared memory: a swizzled row's 128 bytes are 64 columns. Four warps copy 16 bytes a thread.
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([TOKENS, 64], gl.bfloat16))
GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
GATHERING = gl.constexpr(128)
STAGES = gl.constexpr(4)
# Of a thread: where a kernel begins with twelve warps, and after they have been shared out again.
REGISTERS = 168
MULTIPLYING_REGISTERS, FETCHING_REGISTERS = gl.constexpr(224), gl.constexpr(56)


def row_tiles(rows: torch.Tensor) -> TensorDescriptor:
    """Of bf16 [..., C]: 128 rows by 64 columns each."""
    return TensorDescriptor.from_tensor(rows.view(-1, rows.shape[-1]), [128, 64], TILE.value)


def multiprocessors(tensor: torch.Tensor) -> int:
    """Of its GPU; 1 on "meta"."""
    if tensor.is_meta:
        return 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


@gluon.jit
def tile_of(tiles, tile, there):
    """Slot (-1: none), first row and last + 1."""
    slot = gl.load(tiles + 3 * tile, there, -1)
    first = gl.load(tiles + 3 * tile + 1, there, 0)
    last = gl.load(tiles + 3 * tile + 2, there, 0)
    return slot, first, last


@gluon.jit
def store_rows(
    y,
    sorted_pairs,
    first,
    last,
    column,
    value,
    N: gl.constexpr,
    COLUMNS: gl.constexpr,
    IN_ORDER: gl.constexpr,
):
    """value bf16 [rows, COLUMNS] to y's rows from `first` to `last`, or to those of the pairs that are there
    in `sorted_pairs`; columns from `column` on, below N. 16 bytes at a time."""
    ACROSS: gl.constexpr = COLUMNS // 8
    BESIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    value = gl.convert_layout(value, BESIDE)
    place = first + gl.arange(0, value.shape[0], gl.SliceLayout(1, BESIDE))
    inside = place < last
    row = place if IN_ORDER else gl.load(sorted_pairs + place, inside, 0)
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, BESIDE))
    at = row.to(gl.int64)[:, None] * N + n[None, :]
    gl.store(y + at, value, inside[:, None] & (n < N)[None, :])
