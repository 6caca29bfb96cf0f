"""Integers of 4 or 8 bits that share a factor, and perhaps a zero point, by group of columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from moebius_kernels.formats.codes import spread, unpack_nibbles
from moebius_kernels.formats.format import Component


@dataclass(frozen=True, slots=True)
class IntGroup:
    """`data` uint8 [R, C/2] (4 bits; the low nibble is the even column) or [R, C] (8 bits), `scale`
    `scale_dtype` [R, C/group], and `zero` uint8 [R, C/group] if the form has zero points.

    Value: (data - zero) * scale; without zero points, zero is half the range: 8 or 128. `group` None is one
    group a row. The last group may be ragged.
    """

    bits: Literal[4, 8]
    group: int | None
    zero_point: bool
    scale_dtype: torch.dtype

    @property
    def name(self) -> str:
        group = f" g{self.group}" if self.group else ""
        return f"int{self.bits}{group}{' asymmetric' if self.zero_point else ''}"

    @property
    def components(self) -> Mapping[str, Component]:
        components = {
            "data": Component(torch.uint8, columns_per=8 // self.bits),
            "scale": Component(self.scale_dtype, columns_per=self.group),
        }
        if self.zero_point:
            components["zero"] = Component(torch.uint8, columns_per=self.group)
        return components

    @property
    def column_block(self) -> int:
        return 8 // self.bits

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        data = unpack_nibbles(parts["data"]) if self.bits == 4 else parts["data"]
        group = self.group or columns
        zero: torch.Tensor | int = 1 << self.bits - 1
        if self.zero_point:
            zero = spread(parts["zero"].float(), group, columns)
        return (data.float() - zero) * spread(parts["scale"].float(), group, columns)
