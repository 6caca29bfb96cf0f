"""E2M1 codes with columns and bits in the order in which GPU kernels expand them.

NVFP4's factors, which have no sign, lose their denormal numbers: their sign bit becomes a fifth bit of the
exponent, so that one multiplication and addition puts them into a bf16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.format import Component
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.words import CODED, SCALED, from_words

# Where in a half of the word the bits of its four codes are, sign apart from the others, or the upper two of
# the last. A bf16 has them at 15, 8, 7 and 6: the first code is in place, the next two are a shift away.
MOVES = (((12, 8), (6, 7)), ((9, 8), (3, 7)), ((6, 8), (0, 7)), ((11, 12), (10, 3)))
# E8M0's 2^10, and what is no number.
INFINITE, _NAN = 137, 255


@dataclass(frozen=True, slots=True)
class E2m1Words:
    """`base`, but for the order of codes and the lengths of rows, which are for whole columns of 32 and, of
    factors, 256: zeros follow the last, so that kernels can copy rows by 16 bytes and factors by 4 or more.

    `data` has codes in words (`words.py`), with bits where `MOVES` puts them.

    `scale` is uint8. NVFP4's has 5 bits of exponent, biased by 15, and 3 of mantissa; 0 is 2^-15. MXFP4's is
    at most `INFINITE`, which stands for all from 2^10 on: products of bf16 have none.
    """

    base: Nvfp4 | Mxfp4

    @property
    def name(self) -> str:
        return f"{self.base.name} words"

    @property
    def components(self) -> Mapping[str, Component]:
        factors = SCALED // self.base.column_block
        return {
            **self.base.components,
            "data": Component(torch.uint8, columns_per=CODED, items=CODED // 2),
            "scale": Component(torch.uint8, columns_per=SCALED, items=factors),
        }

    @property
    def column_block(self) -> int:
        return self.base.column_block

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        scale = parts["scale"][..., : columns // self.base.column_block]
        if isinstance(self.base, Nvfp4):
            scale = ((scale.int() << 20) + (112 << 23)).view(torch.float32)
        else:
            scale = scale.masked_fill(scale == INFINITE, _NAN)
        data = from_words(parts["data"], MOVES)[..., : columns // 2]
        return self.base.dequantize({**parts, "data": data, "scale": scale}, columns)


def wider_exponents(scale: torch.Tensor) -> torch.Tensor:
    """uint8 of the E4M3 factors, which must not be negative. 0 becomes 2^-15: its codes have to be 0, too."""
    # fp32 has the same three bits of mantissa on top of its own, and all of these numbers are normal in it.
    bits = scale.float().view(torch.int32) >> 20
    return (bits - (112 << 3)).clamp(min=0).to(torch.uint8)
