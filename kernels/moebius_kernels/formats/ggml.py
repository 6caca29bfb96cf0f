"""Rows of blocks in one of ggml's tensor types, as GGUF files have them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from moebius_kernels.formats.format import Component
from moebius_kernels.formats.ggml_blocks import DECODERS
from moebius_kernels.formats.ggml_codebooks import CODEBOOKS

# Decoded by the package `gguf`, on the CPU: models have this type in the form `Nvfp4`.
_BY_PACKAGE = frozenset({Type.NVFP4})
GGML_TYPES = frozenset(DECODERS) | frozenset(CODEBOOKS) | _BY_PACKAGE


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
        data = parts["data"]
        _, block_bytes = GGML_QUANT_SIZES[self.type]
        if (look_up := CODEBOOKS.get(self.type)) is not None:
            return look_up(data.unflatten(-1, (-1, block_bytes))).values.flatten(-2)
        if (decode := DECODERS.get(self.type)) is not None:
            return decode(data.unflatten(-1, (-1, block_bytes))).flatten(-2)
        values = dequantize(data.contiguous().cpu().numpy(), self.type)
        return torch.from_numpy(values).to(data.device)
