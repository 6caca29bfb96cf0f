"""What other engines' experts want beside their products: padded blocks of pairs, and a weighted sum.

Theirs come as compiled CUDA; these stand in for them, with as few launches.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moebius_kernels.triton.align import FEW_PAIRS, align, most_tiles


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs (token, expert) by expert, in blocks of one size that are filled up with the number of pairs.

    `pairs` int32 [bound * size]; `experts` int32 [bound], one a block; `rows` int32 [1]: of blocks in use.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    rows: torch.Tensor


def blocks_of(experts: torch.Tensor, num_experts: int, size: int) -> Blocks:
    """experts int64 [T, K], contiguous; `size`: pairs of a block, any number."""
    count = experts.numel()
    bound = most_tiles(count, num_experts, size)
    pairs, owners, rows = (
        torch.empty(length, dtype=torch.int32, device=experts.device) for length in (bound * size, bound, 1)
    )
    width = triton.next_power_of_2(size)
    if count > FEW_PAIRS:
        found = align(experts, None, num_experts, size)
        _padded[(bound,)](found.tiles, found.sorted_pairs, pairs, owners, count, SIZE=size, WIDTH=width)
        return Blocks(pairs, owners, ((found.tiles[:, 0] >= 0).sum(0, keepdim=True) * size).int())
    _few_blocks[(bound,)](
        experts, pairs, owners, rows, count, num_experts,
        BINS=triton.next_power_of_2(num_experts + 1), PAIRS=triton.next_power_of_2(count), SIZE=size,
        WIDTH=width,
    )  # fmt: skip
    return Blocks(pairs, owners, rows)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs [T, K, H], weights fp32 [T, K] -> [T, H]."""
    tokens, top_k, hidden = outputs.shape
    y = torch.empty(tokens, hidden, dtype=outputs.dtype, device=outputs.device)
    block = 256 if tokens <= 64 else 1024
    grid = (tokens, triton.cdiv(hidden, block))
    _weighted_sum[grid](outputs, weights, y, TOP_K=top_k, HIDDEN=hidden, BLOCK=block)
    return y


@triton.jit
def _few_blocks(
    experts, pairs, owners, rows, count, num_experts,
    BINS: tl.constexpr, PAIRS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program a block, which looks at all pairs."""
    block = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    expert = tl.load(experts + pair, pair < count, num_experts).to(tl.int32)
    bin = tl.arange(0, BINS)
    found = tl.where(bin < num_experts, tl.histogram(expert, BINS), 0)
    blocks = (found + SIZE - 1) // SIZE
    ends = tl.cumsum(blocks, 0)
    owner = tl.sum((ends <= block).to(tl.int32), 0)
    start = (block - tl.sum(tl.where(bin < owner, blocks, 0), 0)) * SIZE
    own = expert == owner
    rank = tl.cumsum(own.to(tl.int32), 0) - 1 - start
    tl.store(pairs + block * SIZE + rank, pair, own & (pair < count) & (rank >= 0) & (rank < SIZE))
    row = tl.arange(0, WIDTH)
    empty = (row < SIZE) & (row >= tl.sum(own.to(tl.int32), 0) - start)
    tl.store(pairs + block * SIZE + row, count, empty)
    tl.store(owners + block, tl.minimum(owner, num_experts - 1))
    if block == 0:
        tl.store(rows, tl.sum(blocks, 0) * SIZE)


@triton.jit
def _padded(tiles, sorted_pairs, pairs, owners, count, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    block = tl.program_id(0)
    owner = tl.load(tiles + 3 * block)
    first = tl.load(tiles + 3 * block + 1)
    row = tl.arange(0, WIDTH)
    used = (owner >= 0) & (first + row < tl.load(tiles + 3 * block + 2))
    found = tl.load(sorted_pairs + first + row, used, count)
    tl.store(pairs + block * SIZE + row, found, row < SIZE)
    tl.store(owners + block, tl.maximum(owner, 0))


@triton.jit
def _weighted_sum(outputs, weights, y, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        value = tl.load(outputs + (token * TOP_K + k) * HIDDEN + at, at < HIDDEN, 0.0)
        total += value.to(tl.float32) * tl.load(weights + token * TOP_K + k)
    tl.store(y + token * HIDDEN + at, total.to(y.dtype.element_ty), at < HIDDEN)
