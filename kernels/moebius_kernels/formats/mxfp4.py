"""MXFP4: E2M1 codes and a power of two for each 32 columns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.codes import decode_e2m1, decode_e8m0, spread, unpack_nibbles
from moebius_kernels.formats.format import Component

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`data` uint8 [R, C/2], the low nibble being the even column; `scale` uint8 [R, C/32], E8M0.

    Value: E2M1[nibble] * 2^(scale - 127), which is exact.
    """

    @property
    def name(self) -> str:
        return "mxfp4"

    @property
    def components(self) -> Mapping[str, Component]:
        return {
            "data": Component(torch.uint8, columns_per=2),
            "scale": Component(torch.uint8, columns_per=_BLOCK),
        }

    @property
    def column_block(self) -> int:
        return _BLOCK

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        codes = decode_e2m1(unpack_nibbles(parts["data"]))
        return codes * spread(decode_e8m0(parts["scale"]), _BLOCK, columns)
