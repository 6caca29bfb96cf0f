"""E2M1 codes with the bits of each eight columns in the order in which GPU kernels expand them.

NVFP4's factors, which have no sign, lose their denormal numbers: their sign bit becomes a fifth bit of the
exponent, so that one multiplication and addition puts them into a bf16.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from moebius_kernels.formats.codes import pack_nibbles, unpack_nibbles
from moebius_kernels.formats.format import Component
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4

# Where in a half of the word the bits of its four codes are: sign, then exponent and mantissa, from the
# highest on. A bf16 has them at 15, 8, 7 and 6: the first code is in place, the next two are a shift away.
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


@dataclass(frozen=True, slots=True)
class E2m1Words:
    """`base`, but for the order of the bits of `data`: of each 4 bytes, a little-endian word, the low half
    has the codes of the even columns and the high half those of the odd ones, each as `PLACES` says.

    NVFP4's `scale` is uint8 here: 5 bits of exponent, biased by 15, and 3 of mantissa; 0 is 2^-15.
    """

    base: Nvfp4 | Mxfp4

    @property
    def name(self) -> str:
        return f"{self.base.name} words"

    @property
    def components(self) -> Mapping[str, Component]:
        components = dict(self.base.components)
        if isinstance(self.base, Nvfp4):
            components["scale"] = replace(components["scale"], dtype=torch.uint8)
        return components

    @property
    def column_block(self) -> int:
        return self.base.column_block

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        natural = {**parts, "data": from_words(parts["data"])}
        if isinstance(self.base, Nvfp4):
            natural["scale"] = ((parts["scale"].int() << 20) + (112 << 23)).view(torch.float32)
        return self.base.dequantize(natural, columns)


def wider_exponents(scale: torch.Tensor) -> torch.Tensor:
    """uint8 of the E4M3 factors, which must not be negative. 0 becomes 2^-15: its codes have to be 0, too."""
    # fp32 has the same three bits of mantissa on top of its own, and all of these numbers are normal in it.
    bits = scale.float().view(torch.int32) >> 20
    return (bits - (112 << 3)).clamp(min=0).to(torch.uint8)


def to_words(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4 n] with a code a nibble, the low one first -> the same with the bits in words' order."""
    codes = unpack_nibbles(data).unflatten(-1, (-1, 4, 2)).int()
    halves = torch.zeros_like(codes[..., 0, :])
    for pair, places in enumerate(PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            halves |= (codes[..., pair, :] >> bit & 1) << place
    return torch.stack((halves & 255, halves >> 8), -1).to(torch.uint8).flatten(-3)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_words`."""
    pairs = words.unflatten(-1, (-1, 2, 2)).int()
    halves = pairs[..., 0] | pairs[..., 1] << 8
    codes = torch.zeros((*halves.shape[:-1], 4, 2), dtype=torch.int32, device=words.device)
    for pair, places in enumerate(PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            codes[..., pair, :] |= (halves >> place & 1) << bit
    return pack_nibbles(codes.flatten(-3).to(torch.uint8))
