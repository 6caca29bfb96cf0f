"""Rows of blocks in one of ggml's tensor types, as GGUF files have them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.format import Component
from moebius_kernels.formats.ggml_blocks import DECODERS
from moebius_kernels.formats.ggml_codebooks import CODEBOOKS

# All that weights may have but MXFP4 and NVFP4, which are told as `Mxfp4` and `Nvfp4`.
GGML_TYPES = frozenset(DECODERS) | frozenset(CODEBOOKS)


@dataclass(frozen=True, slots=True)
class Ggml:
    """`data` uint8 [R, bytes of a row]. The type is one of `GGML_TYPES`."""

    type: Type

    @property
    def name(self) -> str:
        return self.type.name.lower()

    @property
    def components(self) -> Mapping[str, Component]:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return {"data": Component(torch.uint8, columns_per=block, items=block_bytes)}

    @property
    def column_block(self) -> int:
        return GGML_QUANT_SIZES[self.type][0]

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        blocks = parts["data"].unflatten(-1, (-1, GGML_QUANT_SIZES[self.type][1]))
        if (look_up := CODEBOOKS.get(self.type)) is not None:
            return look_up(blocks).values.flatten(-2)
        return DECODERS[self.type](blocks).flatten(-2)
