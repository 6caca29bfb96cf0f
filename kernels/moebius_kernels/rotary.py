"""Rotary position embedding."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). `attention_factor` multiplies cosine and sine."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Gemma 4's global layers: only the first `share` of the pairs turn, `factor` times slower.

    Unlike in a partial rotation the pairs lie half a head apart, and wavelengths go by the whole head.
    """

    share: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """What fixes the angles: base of the wavelengths, scaling for long contexts, and which numbers turn.

    The first `rotary_dim` numbers D of a head do, all of them or fewer: in the pairs (i, i + D / 2) ("rotate
    half", the form of most Hugging Face checkpoints), or, if `interleaved`, (2i, 2i + 1) (DeepSeek).
    """

    rotary_dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Angles:
    """Of each token: cos and sin, fp32 [T, 1, D], ready for `apply_rotary`."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


def inverse_frequencies(spec: RotarySpec) -> torch.Tensor:
    """Radians a position, fp32 [D / 2], on the CPU."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, spec.theta, scaling)
        case ProportionalScaling(share=share, factor=factor):
            turning = int(share * spec.rotary_dim // 2)
            return torch.cat((plain[:turning] / factor, torch.zeros(len(plain) - turning)))


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """By how much attention sharpens when YaRN stretches the context `factor` times.

    DeepSeek multiplies its softmax scale by the square of that for `mscale_all_dim`, and cosine and sine by
    the ratio of those for `mscale` and `mscale_all_dim`.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    # How often a wave fits into the original context: few times = long wave.
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(plain: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    head_dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        """The (fractional) dimension whose wave makes so many turns in the original context."""
        span = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    share = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return share * plain / scaling.factor + (1 - share) * plain


class Rotary:
    """Angles of positions, computed when they are asked for: no table, hence no longest context."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        frequencies = inverse_frequencies(spec)
        # The first of each pair turns the other way: its cosine is the same, its sine has the minus of the
        # rotation, once, not in every head of every layer. Partners lie side by side, or half of D apart.
        both = torch.stack((-frequencies, frequencies), dim=-1 if spec.interleaved else 0)
        self._frequencies = both.flatten().to(device)
        self._amplitude = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
        self._interleaved = spec.interleaved

    def __call__(self, positions: torch.Tensor) -> Angles:
        """positions [T], any integer dtype."""
        # Each line is a launch, which a step waits for.
        angles = positions.float()[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return Angles(cos, sin, self._interleaved)


def apply_rotary(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotates the first numbers of each head, as many as the angles are for; the others pass.

    x [T, heads, D]; computed in fp32, returned in x's dtype.
    """
    _, _, dim = x.shape
    width = angles.cos.shape[-1]
    turning = x[..., :width]
    if angles.interleaved:
        partners = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = turning.roll(width // 2, dims=-1)
    turned = (turning * angles.cos + partners * angles.sin).to(x.dtype)
    return turned if width == dim else torch.cat((turned, x[..., width:]), dim=-1)
