"""Random draws that depend on (seed, position) and the logits, and on nothing else.

A draw is the arg max of logits / temperature + Gumbel noise, which is distributed as
softmax(logits / temperature). The noise of a token is a hash of (seed, position, token id). Compared with
the usual way, a uniform number that is looked up in the cumulative distribution:

- There is no generator with a state: a request that is replayed elsewhere, in another batch or on another
  device, draws the same noise. The hash is integer arithmetic, the same everywhere.
- It is robust. Batches of another shape change logits in their last bits. In a cumulative sum over sorted
  tokens such a change can swap two tokens of nearly equal probability, and then every draw that falls on
  them differs; here a draw changes only if the two best sums were equal but for those bits.
- Nothing is sorted unless top-k or top-p ask for it.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from moebius_kernels.splitmix import GOLDEN, ROUNDS, hashed

# Rows drawn together: bounds the memory that the noise takes.
_BLOCK = 16
# Candidates looked at first for top-p; it is rare that they do not hold enough of the mass.
CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Draws:
    """How N rows are drawn, on the device.

    `streams` int64 [N]: `stream_of` each row's seed; `positions` int64 [N]; fp32 [N] `temperature`, 0 for the
    most probable token, `top_p`, and `log_min_p`, -inf for 0; `top_k` int32 [N], 0 for all. `candidates`: how
    many tokens top-k and top-p look at first, no fewer than the largest top_k; 0 if no row has either.
    """

    streams: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    candidates: int

    @property
    def truncated(self) -> bool:
        """Whether some row has top-k or top-p."""
        return self.candidates > 0

    def of(self, rows: torch.Tensor) -> "Draws":
        """Those of some rows: their indices, or a mask."""
        names = [field.name for field in fields(self) if field.name != "candidates"]
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True, slots=True)
class Drawn:
    """`token_ids` int64 [N], worth nothing where `best` fp32 [N], the row's largest logit, is not finite."""

    token_ids: torch.Tensor
    best: torch.Tensor


def draw_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
    """A token for each row of logits, fp32 [N, vocab]. The best is not finite if one of the row is NaN.

    Truncation is by top-k, then by top-p of what is left, then by min-p; tokens that are as probable as the
    last one kept are kept too. Of equals the first is taken.
    """
    best, token_ids = logits.max(dim=-1)
    rows = torch.arange(len(logits), device=logits.device)
    if logits.is_cpu:
        # Looking at them would take a GPU longer than computing what is not needed, and "meta" has none.
        rows = rows[draws.temperature > 0]
    for block in rows.split(_BLOCK):
        mine = draws.of(block)
        scaled = scaled_logits(logits[block], mine)
        scaled.masked_fill_(scaled < floors(scaled, mine).unsqueeze(1), float("-inf"))
        drawn = gumbel(mine, logits.shape[1]).add_(scaled).argmax(dim=-1)
        token_ids[block] = torch.where(mine.temperature > 0, drawn, token_ids[block])
    return Drawn(token_ids, best)


@lru_cache(maxsize=4096)
def stream_of(seed: int) -> int:
    """Where the random numbers of a seed begin, as a signed 64-bit number."""
    return _signed(hashed(seed + GOLDEN))


def scaled_logits(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Logits over temperature, shifted so that the best is 0: the smallest temperatures cannot overflow.

    With temperature 0 just shifted.
    """
    temperature = torch.where(draws.temperature > 0, draws.temperature, 1.0).unsqueeze(1)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def floors(scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
    """For each row the least scaled logit that is kept, [N]."""
    return _nucleus(scaled, draws).maximum(draws.log_min_p) if draws.truncated else draws.log_min_p


def gumbel(draws: Draws, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, fp64 [N, vocab]."""
    keys = _mixed(draws.streams + draws.positions * _signed(GOLDEN))
    steps = torch.arange(vocab_size, device=keys.device) * _signed(GOLDEN)
    bits = _mixed(keys.unsqueeze(1) + steps)
    # 52 bits and a half: the ends 0 and 1, whose noise is infinite, cannot occur.
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _nucleus(scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The scaled logit of the last token that top-k and top-p keep, [N]; -inf in rows that have neither."""
    vocab_size = scaled.shape[1]
    limit = torch.where(draws.top_k == 0, vocab_size, draws.top_k.clamp(max=vocab_size)).unsqueeze(1)
    top_p = draws.top_p.double().unsqueeze(1)
    everything = (limit == vocab_size) & (top_p >= 1)
    all_mass = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    # On a GPU nobody waits to see how many it takes.
    width = vocab_size if scaled.is_cuda else min(vocab_size, draws.candidates)
    while True:
        values = scaled.topk(width, dim=-1).values
        inside = torch.arange(width, device=scaled.device) < limit
        mass = values.double().exp() * inside
        up_to = mass.cumsum(dim=-1)
        total = torch.where(limit > width, all_mass, up_to[:, -1:])
        # A token is kept if those before it do not yet hold the mass; the first one always is.
        kept = (inside & (up_to - mass < top_p * total)).sum(dim=-1, keepdim=True).clamp_(min=1)
        if width == vocab_size or not ((kept == width) & (limit > width) & ~everything).any():
            return values.gather(1, kept - 1).masked_fill(everything, float("-inf")).squeeze(1)
        width = vocab_size


def _mixed(states: torch.Tensor) -> torch.Tensor:
    """`hashed` of int64, in place; products wrap around as those of unsigned numbers do."""
    for shift, multiplier in ROUNDS:
        states.bitwise_xor_(_shift_right(states, shift)).mul_(_signed(multiplier))
    return states


def _shift_right(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift that moves zeros in; PyTorch's moves in the sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
