"""Codes of few bits in planes, with the scales apart: ggml's types as kernels like to read them.

A ggml block has everything of its 32 or 256 columns side by side, at odd addresses. Here each component is a
matrix of its own, so that a row's codes can be read 16 bytes at a time.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.codes import spread
from moebius_kernels.formats.format import Component
from moebius_kernels.formats.ggml_blocks import IQ4_NL

_IQ4_NL_HALVES = IQ4_NL[:8], IQ4_NL[8:]
_SUPER = 256
_OCTET = 8


@dataclass(frozen=True, slots=True)
class Planes:
    """Codes of `low_bits` + `high_bits` bits, and factors and minima by groups of `group` columns.

    `low` uint8: `low_bits` (4 or 2) of each code, `high` uint8: its other 1 or 2, if any. Of a plane, each 8
    columns have `bits` bytes. Where bits is 4, the low nibble is the even column; else the even columns'
    bits come first, then those of the odd ones, each from the lowest bit of the little-endian word on.

    `scales` says what the factors are:
    - "number": `scale` fp16 [R, C/group].
    - "centred": `scale` bf16 [R, 2 C/group], factor and offset alternate.
    - "super": `scale` int8 [R, C/group], times `super` fp32 [R, C/256].
    - "super_nibble": `scale` uint8 [R, C/group], factor and minimum in its low and high nibble, times `super`
      fp16 [R, 2 C/256], one for factors and one for minima, which are subtracted.

    Value: (code - half the range) * factor, plus the offset if there are any; with minima code * factor -
    minimum; IQ4_NL[code] * factor if `table`. The bf16 factors and offsets are rounded from what the files
    have, which kernels would do anyway, before each product of bf16 numbers; all else is exact.
    """

    type: str
    low_bits: int
    high_bits: int
    group: int
    scales: str
    table: bool = False

    @property
    def name(self) -> str:
        return f"{self.type} planes"

    @property
    def components(self) -> Mapping[str, Component]:
        parts = {"low": Component(torch.uint8, columns_per=_OCTET, items=self.low_bits)}
        if self.high_bits:
            parts["high"] = Component(torch.uint8, columns_per=_OCTET, items=self.high_bits)
        return {**parts, **_scale_components(self.scales, self.group)}

    @property
    def column_block(self) -> int:
        return _SUPER if self.scales.startswith("super") else self.group

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        codes = unpack_plane(parts["low"], self.low_bits)
        if self.high_bits:
            codes = codes | unpack_plane(parts["high"], self.high_bits) << self.low_bits
        half = 1 << self.low_bits + self.high_bits - 1
        factor, offset = _factors(parts, self.scales, columns, self.group, half)
        factor = spread(factor, self.group, columns)
        if self.table:
            return _iq4_nl(codes) * factor
        value = (codes.float() - half) * factor
        return value if offset is None else value + spread(offset, self.group, columns)


def _iq4_nl(codes: torch.Tensor) -> torch.Tensor:
    """fp32, out of two words of eight bytes, since no CUDA graph copies a table from the host."""
    low, high = (int.from_bytes(struct.pack("8b", *half), "little", signed=True) for half in _IQ4_NL_HALVES)
    word = torch.where(codes < 8, low, high)
    return (word >> (codes & 7) * 8).to(torch.int8).float()


def _scale_components(scales: str, group: int) -> Mapping[str, Component]:
    match scales:
        case "number":
            return {"scale": Component(torch.float16, columns_per=group)}
        case "centred":
            return {"scale": Component(torch.bfloat16, columns_per=group, items=2)}
        case "super":
            factor = Component(torch.int8, columns_per=group)
            return {"scale": factor, "super": Component(torch.float32, columns_per=_SUPER)}
    super_pair = Component(torch.float16, columns_per=_SUPER, items=2)
    return {"scale": Component(torch.uint8, columns_per=group), "super": super_pair}


def _factors(
    parts: Mapping[str, torch.Tensor], scales: str, columns: int, group: int, half: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 [..., C/group]: factors, and offsets of codes minus `half` if there are any."""
    scale = parts["scale"]
    match scales:
        case "number":
            return scale.float(), None
        case "centred":
            return scale[..., 0::2].float(), scale[..., 1::2].float()
    groups = columns // group
    wide = parts["super"].float()
    if scales == "super":
        return scale.float() * spread(wide, _SUPER // group, groups), None
    of_factors, of_minima = (spread(wide[..., i::2], _SUPER // group, groups) for i in range(2))
    factor = (scale & 15).float() * of_factors
    return factor, half * factor - (scale >> 4).float() * of_minima


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    """Where in the word of 8 codes each column's bits begin."""
    column = torch.arange(_OCTET, device=device)
    return column * bits if bits == 4 else (column // 2 + column % 2 * 4) * bits


def unpack_plane(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 codes [..., C] of the bytes [..., C/8 * bits]."""
    octets = plane.unflatten(-1, (-1, bits)).int()
    place = 8 * torch.arange(bits, device=plane.device)
    words = (octets.long() << place).sum(-1)
    return (words[..., None] >> _shifts(bits, plane.device) & (1 << bits) - 1).flatten(-2).int()


def pack_plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_plane`."""
    words = (codes.unflatten(-1, (-1, _OCTET)).long() << _shifts(bits, codes.device)).sum(-1)
    place = 8 * torch.arange(bits, device=codes.device)
    return (words[..., None] >> place & 255).to(torch.uint8).flatten(-2)
