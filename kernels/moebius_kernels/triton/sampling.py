"""Tokens from logits, with nobody waiting. `moebius_kernels.sampling` says what is computed.

What top-k and top-p keep is looked for among the best tokens; should these not hold enough of the mass, in
the row concerned a bisection of the floats goes over all.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.sampling import Drawn, Draws
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, power_of_two

_BLOCK = 1024
# Blocks of a row, which one program puts together.
_MOST_BLOCKS = 4096
# The place of no token.
_NOWHERE = tl.constexpr(2**31 - 1)
# SplitMix64 (Steele, Lea, Flood 2014): a step and the two multipliers of its finaliser.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST, _SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)


# The largest of each row, in descending order: fp32 [N, vocab] and how many -> [N, count].
Select = Callable[[torch.Tensor, int], torch.Tensor]


def draw_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
    """As `moebius_kernels.sampling.draw_tokens`."""
    return draw_among(logits, draws, _largest_of)


def draw_among(logits: torch.Tensor, draws: Draws, select: Select) -> Drawn:
    """`select` finds what top-k and top-p look at first."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    blocks = ceil_div(vocab, _BLOCK)
    tops, sums = logits.new_empty(rows, blocks), logits.new_empty(rows, blocks, dtype=torch.float64)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    best, floors = logits.new_empty(rows), draws.log_min_p
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tile = power_of_two(blocks)
    launch(_top_of_block, (rows, blocks), logits, tops, places, vocab, blocks, BLOCK=_BLOCK)
    launch(_top_of_row, (rows,), tops, places, best, token_ids, blocks, TILE=tile)
    if draws.truncated:
        floors = _floors(logits, best, draws, select)
    launch(
        _draw_in_block,
        (rows, blocks),
        logits, best, floors, draws.temperature, draws.streams, draws.positions, sums, places, vocab,
        blocks, BLOCK=_BLOCK,
    )  # fmt: skip
    launch(_draw_in_row, (rows,), sums, places, draws.temperature, token_ids, blocks, TILE=tile)
    return Drawn(token_ids, best)


def _largest_of(logits: torch.Tensor, count: int) -> torch.Tensor:
    return logits.topk(count, dim=-1).values


def _floors(logits: torch.Tensor, best: torch.Tensor, draws: Draws, select: Select) -> torch.Tensor:
    """The least logit over temperature that a row keeps, [N]; -inf for all."""
    vocab = logits.shape[1]
    width = min(vocab, draws.candidates)
    warm = draws.temperature > 0
    temperature = torch.where(warm, draws.temperature, 1.0).unsqueeze(1)
    top_p, best_of_row = draws.top_p.double().unsqueeze(1), best.unsqueeze(1)
    limit = torch.where(draws.top_k == 0, vocab, draws.top_k.clamp(max=vocab)).unsqueeze(1)
    values = (select(logits, width) - best_of_row) / temperature
    all_mass = ((logits - best_of_row) / temperature).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    inside = torch.arange(width, device=logits.device) < limit
    mass = values.double().exp_() * inside
    up_to = mass.cumsum(dim=-1)
    total = torch.where(limit > width, all_mass, up_to[:, -1:])
    # A token is kept if those before it do not yet hold the mass; the first one always is.
    kept = (inside & (up_to - mass < top_p * total)).sum(dim=-1, keepdim=True).clamp_(min=1)
    everything = (limit == vocab) & (top_p >= 1)
    floors = values.gather(1, kept - 1).masked_fill_(everything, float("-inf"))
    unfinished = (kept == width) & (limit > width) & ~everything & warm.unsqueeze(1)
    floors = floors.squeeze(1)
    launch(
        _search_floor,
        (len(logits),),
        logits, best, temperature, draws.top_p, all_mass, unfinished, floors, vocab, BLOCK=8 * _BLOCK,
        num_warps=16,
    )  # fmt: skip
    return floors.maximum(draws.log_min_p)


@triton.jit
def _top_of_block(logits, tops, places, vocab, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    top = _largest(values)
    tl.store(tops + row * blocks + block, top)
    tl.store(places + row * blocks + block, _first(values == top, token))


@triton.jit
def _top_of_row(tops, places, best, token_ids, blocks, TILE: tl.constexpr):
    """The token, too, which is the one of rows without temperature."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, TILE)
    exists = block < blocks
    values = tl.load(tops + row * blocks + block, mask=exists, other=float("-inf"))
    place = tl.load(places + row * blocks + block, mask=exists, other=_NOWHERE)
    top = _largest(values)
    tl.store(best + row, top)
    _store_token(token_ids + row, _first(exists & (values == top), place))


@triton.jit
def _largest(values):
    """NaN if one is."""
    bad = tl.sum((values != values).to(tl.int32), 0) > 0
    return tl.where(bad, float("nan"), tl.max(values, 0))


@triton.jit
def _first(those, places):
    """Of equals the first; `_NOWHERE` if there is none."""
    return tl.min(tl.where(those, places, _NOWHERE), 0)


@triton.jit
def _store_token(at, token):
    # A row that is not finite has no best token; any will do.
    tl.store(at, tl.where(token == _NOWHERE, 0, token).to(tl.int64))


@triton.jit
def _scaled(values, top, temperature):
    """Logits over temperature; the best is 0."""
    difference = values - top
    return tl.math.div_rn(difference, tl.zeros_like(difference) + temperature)


@triton.jit
def _negative(bits):
    """The float at most 0 with these bits but for the sign: larger bits, smaller float."""
    return -(bits.to(tl.float32, bitcast=True))


# Columns of `Draws` may begin anywhere; that is no reason to compile again.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ps"])
def _search_floor(
    logits, best, temperatures, top_ps, all_mass, unfinished, floors, vocab, BLOCK: tl.constexpr
):
    """The least x such that the tokens above it hold less than top_p of the mass, where it is not known."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(unfinished + row):
        top, temperature = tl.load(best + row), tl.load(temperatures + row)
        enough = tl.load(top_ps + row).to(tl.float64) * tl.load(all_mass + row)
        # `low` is such an x, `high` is not. 0x7F800000 is -inf; logits over temperature are at most 0.
        low, high = tl.full((), 0, tl.int32), tl.full((), 0x7F800001, tl.int32)
        for _ in range(31):
            middle = low + (high - low) // 2
            mass = tl.zeros((BLOCK,), tl.float64)
            for first in range(0, vocab, BLOCK):
                token = first + tl.arange(0, BLOCK)
                values = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
                scaled = _scaled(values, top, temperature)
                mass += tl.where(scaled > _negative(middle), tl.exp(scaled), 0.0).to(tl.float64)
            fits = tl.sum(mass, 0) < enough
            low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
        tl.store(floors + row, _negative(low))


@triton.jit
def _mixed(state):
    """SplitMix64's finaliser of uint64."""
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    return state ^ (state >> 31)


@triton.jit(do_not_specialize_on_alignment=["floors", "temperatures", "streams", "positions"])
def _draw_in_block(
    logits, best, floors, temperatures, streams, positions, sums, places, vocab, blocks, BLOCK: tl.constexpr
):
    """The best token of BLOCK: its logit over temperature plus noise, and its place."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    # Its token is known.
    if temperature <= 0.0:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab
    values = tl.load(logits + row * vocab + token, mask=exists, other=float("-inf"))
    scaled = _scaled(values, tl.load(best + row), temperature)
    stream = tl.load(streams + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    key = _mixed(stream + position * _GOLDEN)
    bits = _mixed(key + token.to(tl.uint64) * _GOLDEN)
    # 52 bits and a half: the ends 0 and 1, whose noise is infinite, cannot occur.
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    noise = -tl.log(-tl.log(uniform))
    score = tl.where(scaled < tl.load(floors + row), float("-inf"), scaled).to(tl.float64) + noise
    score = tl.where(exists, score, float("-inf"))
    top = tl.max(score, 0)
    tl.store(sums + row * blocks + block, top)
    tl.store(places + row * blocks + block, _first(exists & (score == top), token))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _draw_in_row(sums, places, temperatures, token_ids, blocks, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperatures + row) <= 0.0:
        return
    block = tl.arange(0, TILE)
    exists = block < blocks
    score = tl.load(sums + row * blocks + block, mask=exists, other=float("-inf"))
    place = tl.load(places + row * blocks + block, mask=exists, other=_NOWHERE)
    _store_token(token_ids + row, _first(exists & (score == tl.max(score, 0)), place))


def admits(query: Query) -> str | None:
    logits = query.arguments["logits"]
    if logits.dtype != "float32":
        return f"logits in {logits.dtype}, it takes float32"
    most = _MOST_BLOCKS * _BLOCK
    return f"rows of {logits.shape[-1]} logits, it takes {most}" if logits.shape[-1] > most else None


BACKENDS = (Backend("draw_tokens", "triton", draw_tokens, architectures=ARCHITECTURES, admits=admits),)
