"""NVFP4: E2M1 codes, an E4M3 factor for each 16 columns, and a second factor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.codes import decode_e2m1, spread, unpack_nibbles
from moebius_kernels.formats.format import Component

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """`data` uint8 [R, C/2], `scale` e4m3fn [R, C/16], `row_scale` fp32 [R, 1].

    Value: E2M1[nibble] * scale * row_scale; the low nibble is the even column. Producers store one second
    factor a matrix; here each row has its own, so that matrices with different ones can be fused.
    """

    @property
    def name(self) -> str:
        return "nvfp4"

    @property
    def components(self) -> Mapping[str, Component]:
        return {
            "data": Component(torch.uint8, columns_per=2),
            "scale": Component(torch.float8_e4m3fn, columns_per=_BLOCK),
            "row_scale": Component(torch.float32, columns_per=None),
        }

    @property
    def column_block(self) -> int:
        return _BLOCK

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        codes = decode_e2m1(unpack_nibbles(parts["data"]))
        # The first product is exact in fp32, so that the value is rounded once.
        return codes * spread(parts["scale"].float(), _BLOCK, columns) * parts["row_scale"]
