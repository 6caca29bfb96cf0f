"""FP8 E4M3 numbers that share a factor by row, by column block, or by block of both."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.codes import spread
from moebius_kernels.formats.format import Component


@dataclass(frozen=True, slots=True)
class Fp8:
    """`data` e4m3fn [R, C] and `scale` fp32, one a block; the last blocks may be ragged.

    Value: data * scale. A factor for a row is (1, None), and one for the whole matrix is stored as one a row.
    `rounds_activations`: the checkpoint declares that what is multiplied with it is FP8 too, so that products
    may be those of `rounded_products.py`.
    """

    block_rows: int = 1
    block_columns: int | None = None
    rounds_activations: bool = False

    @property
    def name(self) -> str:
        return "fp8" if self.block_columns is None else f"fp8 {self.block_rows}x{self.block_columns}"

    @property
    def components(self) -> Mapping[str, Component]:
        return {
            "data": Component(torch.float8_e4m3fn),
            "scale": Component(torch.float32, self.block_rows, self.block_columns),
        }

    @property
    def column_block(self) -> int:
        return 1

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        data = parts["data"].float()
        scale = spread(parts["scale"], self.block_rows, data.shape[-2], dim=-2)
        return data * spread(scale, self.block_columns or columns, columns)
