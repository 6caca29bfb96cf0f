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

import math
from collections.abc import Sequence

import torch

from moebius_worker.engine.types import SamplingParams

# SplitMix64 (Steele, Lea, Flood 2014): a step and the two multipliers of its finaliser.
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = (1 << 64) - 1
# Rows drawn together: bounds the memory that the noise takes.
_BLOCK = 16
# Candidates looked at first for top-p; it is rare that they do not hold enough of the mass.
CANDIDATES = 1024


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Draws a token id for each row of logits, fp32 [N, vocab]; temperatures are above 0.

    Truncation is by top-k, then by top-p of what is left, then by min-p; tokens that are as probable as the
    last one kept are kept too.
    """
    token_ids: list[int] = []
    steps = torch.arange(logits.shape[1], device=logits.device) * _signed(_GOLDEN)
    for first in range(0, len(params), _BLOCK):
        block = slice(first, first + _BLOCK)
        scaled = _scale(logits[block], params[block])
        scaled.masked_fill_(scaled < _floors(scaled, params[block]).unsqueeze(1), float("-inf"))
        keys = [stream_key(one.seed, at) for one, at in zip(params[block], positions[block], strict=True)]
        noise = _gumbel(torch.tensor(keys, device=logits.device).unsqueeze(1) + steps)
        token_ids += noise.add_(scaled).argmax(dim=-1).tolist()
    return token_ids


def stream_key(seed: int, position: int) -> int:
    """Where the random numbers of a position begin, as a signed 64-bit number."""
    return _signed(_mix((_stream(seed) + position * _GOLDEN) & _MASK))


def stream_of(seed: int) -> int:
    """Where the random numbers of a seed begin, as a signed 64-bit number."""
    return _signed(_stream(seed))


def _stream(seed: int) -> int:
    return _mix((seed + _GOLDEN) & _MASK)


def _scale(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits over temperature, shifted so that the best is 0: the smallest temperatures cannot overflow."""
    temperatures = torch.tensor([one.temperature for one in params], device=logits.device).unsqueeze(1)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures


def _floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """For each row the least scaled logit that is kept, [N]."""
    minimums = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params]
    floors = torch.tensor(minimums, device=scaled.device)
    cut = [index for index, one in enumerate(params) if one.top_k > 0 or one.top_p < 1]
    if cut:
        floors[cut] = torch.maximum(floors[cut], _nucleus(scaled[cut], [params[index] for index in cut]))
    return floors


def _nucleus(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The scaled logit of the last token that top-k and top-p keep, [N]."""
    vocab_size = scaled.shape[1]
    limits = [min(one.top_k or vocab_size, vocab_size) for one in params]
    asked = max((one.top_k for one in params), default=0)
    width = min(vocab_size, max(asked, CANDIDATES))
    top_p = torch.tensor([[one.top_p] for one in params], dtype=torch.float64, device=scaled.device)
    limit = torch.tensor(limits, device=scaled.device).unsqueeze(1)
    all_mass = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    while True:
        values = scaled.topk(width, dim=-1).values
        inside = torch.arange(width, device=scaled.device) < limit
        mass = values.double().exp() * inside
        up_to = mass.cumsum(dim=-1)
        total = torch.where(limit > width, all_mass, up_to[:, -1:])
        # A token is kept if those before it do not yet hold the mass; the first one always is.
        kept = (inside & (up_to - mass < top_p * total)).sum(dim=-1, keepdim=True).clamp_(min=1)
        if width == vocab_size or not ((kept == width) & (limit > width)).any():
            return values.gather(1, kept - 1).squeeze(1)
        width = vocab_size


def _gumbel(states: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, fp64, from 64-bit states; `states` is overwritten."""
    bits = _mix_tensor(states)
    # 52 bits and a half: the ends 0 and 1, whose noise is infinite, cannot occur.
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mix(state: int) -> int:
    """SplitMix64's finaliser."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK
    return state


def _mix_tensor(states: torch.Tensor) -> torch.Tensor:
    """`_mix` of int64, in place; products wrap around as those of unsigned numbers do."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        states.bitwise_xor_(_shift_right(states, shift)).mul_(_signed(multiplier))
    return states


def _shift_right(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift that moves zeros in; PyTorch's moves in the sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
