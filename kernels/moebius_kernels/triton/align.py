"""Pairs (token, expert) in the order of the slots of their experts, cut into tiles, on the device.

The order is stable, so that results do not depend on which program comes first. Pairs without an expert
(id -1, or an expert in no slot) come last and belong to no tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.launch import launch
from moebius_kernels.triton.targets import ceil_div, overlapping, power_of_two

# Up to so many pairs, one launch compares each with all others.
FEW_PAIRS = 2048
_OWN = 32
_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Alignment:
    """`sorted_pairs` int32 [P]; `tiles` int32 [bound, 3]: slot (-1: no tile), first and last + 1 in it."""

    sorted_pairs: torch.Tensor
    tiles: torch.Tensor


def most_tiles(pairs: int, num_slots: int, tokens: int) -> int:
    """The most tiles of `tokens` that so many pairs can make."""
    used = min(pairs, num_slots)
    return used + (pairs - used) // tokens


def align(experts: torch.Tensor, slots: torch.Tensor | None, num_slots: int, tokens: int) -> Alignment:
    """experts int64 [T, K], contiguous; `tokens`: of a tile, at most."""
    pairs = experts.numel()
    bound = most_tiles(pairs, num_slots, tokens)
    sorted_pairs = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(bound, 3, dtype=torch.int32, device=experts.device)
    table = experts if slots is None else slots
    bins = power_of_two(num_slots + 1)
    common = {"SLOTS": slots is not None, "BINS": bins, "TOKENS": tokens}
    if pairs <= FEW_PAIRS:
        launch(
            _align_few,
            (ceil_div(pairs, _OWN),),
            experts, table, sorted_pairs, tiles, pairs, num_slots, bound,
            **common, OWN=_OWN, PAIRS=max(_OWN, power_of_two(pairs)), **overlapping(experts),
        )  # fmt: skip
        return Alignment(sorted_pairs, tiles)
    chunks = ceil_div(pairs, _CHUNK)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=experts.device)
    # By slot: pairs, first pair, first tile.
    slot_table = torch.empty(3, bins, dtype=torch.int32, device=experts.device)
    launch(
        _count,
        (chunks,),
        experts,
        table,
        counts,
        pairs,
        num_slots,
        SLOTS=common["SLOTS"],
        BINS=bins,
        CHUNK=_CHUNK,
    )
    launch(_scan, (ceil_div(bins, 16),), counts, slot_table, chunks, BINS=bins, WIDTH=16, STEP=64)
    launch(_begin, (1,), slot_table, tiles, num_slots, bound, BINS=bins, TOKENS=tokens)
    launch(
        _scatter,
        (chunks,),
        experts, table, counts, slot_table, sorted_pairs, tiles, pairs, num_slots,
        **common, CHUNK=_CHUNK,
    )  # fmt: skip
    return Alignment(sorted_pairs, tiles)


@triton.jit
def _slots_of(experts, slots, pair, pairs, num_slots, SLOTS: tl.constexpr):
    """The slots int32 of the pairs; num_slots for those that have none."""
    expert = tl.load(experts + pair, pair < pairs, -1)
    slot = tl.load(slots + expert, expert >= 0, -1) if SLOTS else expert
    return tl.where(slot < 0, num_slots, slot).to(tl.int32)


@triton.jit
def _write_tile(tiles, tile, slot, first, last, keep):
    tl.store(tiles + 3 * tile, slot, keep)
    tl.store(tiles + 3 * tile + 1, first, keep)
    tl.store(tiles + 3 * tile + 2, last, keep)


@triton.jit
def _clear_tiles(tiles, begin, bound):
    while begin < bound:
        at = begin + tl.arange(0, 256)
        tl.store(tiles + 3 * at, -1, at < bound)
        begin += 256


@triton.jit(do_not_specialize_on_alignment=["pairs", "bound"])
def _align_few(
    experts, slots, sorted_pairs, tiles, pairs, num_slots, bound,
    SLOTS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr, OWN: tl.constexpr, PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.arange(0, PAIRS)
    slot = _slots_of(experts, slots, pair, pairs, num_slots, SLOTS)
    bin = tl.arange(0, BINS)
    counts = tl.histogram(tl.where(pair < pairs, slot, BINS - 1), BINS)
    counts = tl.where(bin < num_slots, counts, 0)
    tiles_of = (counts + TOKENS - 1) // TOKENS

    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    own_slot = _slots_of(experts, slots, own, pairs, num_slots, SLOTS)
    lower = slot[None, :] < own_slot[:, None]
    before = (slot[None, :] == own_slot[:, None]) & (pair[None, :] < own[:, None])
    first = tl.sum(lower.to(tl.int32), 1)
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(sorted_pairs + first + rank, own, own < pairs)

    lower_bin = bin[None, :] < own_slot[:, None]
    tile = tl.sum(tl.where(lower_bin, tiles_of[None, :], 0), 1) + rank // TOKENS
    count = tl.sum(tl.where(bin[None, :] == own_slot[:, None], counts[None, :], 0), 1)
    leads = (own < pairs) & (own_slot < num_slots) & (rank % TOKENS == 0)
    last = first + tl.minimum(rank + TOKENS, count)
    _write_tile(tiles, tile, own_slot, first + rank, last, leads)
    if tl.program_id(0) == 0:
        _clear_tiles(tiles, tl.sum(tiles_of, 0), bound)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _count(
    experts, slots, counts, pairs, num_slots, SLOTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = _slots_of(experts, slots, pair, pairs, num_slots, SLOTS)
    found = tl.histogram(tl.where(pair < pairs, slot, BINS - 1), BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def _scan(counts, slot_table, chunks, BINS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Each chunk's counts become those of all chunks before it."""
    bin = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    start = 0
    while start < chunks:
        chunk = start + tl.arange(0, STEP)
        at = counts + chunk[:, None] * BINS + bin[None, :]
        keep = (chunk < chunks)[:, None] & (bin < BINS)[None, :]
        found = tl.load(at, keep, 0)
        tl.store(at, tl.cumsum(found, 0) - found + total[None, :], keep)
        total += tl.sum(found, 0)
        start += STEP
    tl.store(slot_table + bin, total, bin < BINS)


@triton.jit(do_not_specialize_on_alignment=["bound"])
def _begin(slot_table, tiles, num_slots, bound, BINS: tl.constexpr, TOKENS: tl.constexpr):
    bin = tl.arange(0, BINS)
    counts = tl.load(slot_table + bin)
    tiles_of = tl.where(bin < num_slots, (counts + TOKENS - 1) // TOKENS, 0)
    tl.store(slot_table + BINS + bin, tl.cumsum(counts, 0) - counts)
    tl.store(slot_table + 2 * BINS + bin, tl.cumsum(tiles_of, 0) - tiles_of)
    _clear_tiles(tiles, tl.sum(tiles_of, 0), bound)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _scatter(
    experts, slots, counts, slot_table, sorted_pairs, tiles, pairs, num_slots,
    SLOTS: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    slot = _slots_of(experts, slots, pair, pairs, num_slots, SLOTS)
    before = (slot[None, :] == slot[:, None]) & (pair[None, :] < pair[:, None])
    rank = tl.sum(before.to(tl.int32), 1) + tl.load(counts + chunk * BINS + slot)
    first = tl.load(slot_table + BINS + slot)
    tl.store(sorted_pairs + first + rank, pair, pair < pairs)
    tile = tl.load(slot_table + 2 * BINS + slot) + rank // TOKENS
    leads = (pair < pairs) & (slot < num_slots) & (rank % TOKENS == 0)
    last = first + tl.minimum(rank + TOKENS, tl.load(slot_table + slot))
    _write_tile(tiles, tile, slot, first + rank, last, leads)
