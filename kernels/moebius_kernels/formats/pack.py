"""From the forms that files have to those that GPU kernels read."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.codes import pack_nibbles
from moebius_kernels.formats.e2m1_words import INFINITE, MOVES, E2m1Words, wider_exponents
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.ggml import Ggml
from moebius_kernels.formats.ggml_blocks import (
    BITS,
    CRUMBS,
    DECODERS,
    NIBBLES,
    factors_and_minima,
    fields,
)
from moebius_kernels.formats.ggml_codebooks import CODEBOOKS
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.int_words import ROW, IntWords
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.planes import Planes, pack_plane
from moebius_kernels.formats.words import CODED, SCALED, to_words, whole_rows

Parts = dict[str, torch.Tensor]
# Of 4 bits, two in a byte; factors of groups, and offsets.
Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
# Rows that are packed at a time: the intermediate codes are eight times as large.
_ROWS = 1 << 14


def packed_format(format: Format) -> Format:
    """The form that `pack` gives."""
    if isinstance(format, Nvfp4 | Mxfp4):
        return E2m1Words(format)
    if isinstance(format, Ggml):
        return _PACKERS[format.type][0]
    if isinstance(format, IntGroup) and format.bits == 4:
        group = format.group or ROW
        if group >= CODED and not group & group - 1:
            return IntWords(group, centred=format.zero_point or group > CODED)
    return format


def pack(matrix: StoredMatrix) -> StoredMatrix:
    """The numbers in the form that kernels read. Rounded are only factors, as `Planes` and `E2m1Words` say,
    and those of `IntWords` and of IQ2, to bf16.

    The matrix itself if it is in one already.
    """
    target = packed_format(matrix.format)
    if target == matrix.format:
        return matrix
    if isinstance(matrix.format, Ggml):
        _, split = _PACKERS[matrix.format.type]
        _, block_bytes = GGML_QUANT_SIZES[matrix.format.type]
        given = {"data": matrix.parts["data"].unflatten(-1, (-1, block_bytes))}
    else:
        split = _split_of(target, matrix.format)
        given = dict(matrix.parts)
    leading = len(matrix.shape) - 1
    packed = StoredMatrix.empty(target, matrix.shape, matrix.parts["data"].device)
    if matrix.parts["data"].is_meta:
        return packed
    given = {name: part.flatten(0, leading - 1) for name, part in given.items()}
    rows = {name: part.flatten(0, leading - 1) for name, part in packed.parts.items()}
    for start in range(0, len(given["data"]), _ROWS):
        some = {name: part[start : start + _ROWS] for name, part in given.items()}
        for name, part in split(**some).items():
            rows[name][start : start + _ROWS] = part.flatten(1).view(rows[name].dtype)
    return packed


def _split_of(target: Format, format: Format) -> Callable[..., Parts]:
    if isinstance(target, IntWords):
        return partial(_int_group, target=target)
    return _nvfp4 if isinstance(format, Nvfp4) else _mxfp4


def _nvfp4(data: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor) -> Parts:
    zero = (scale.float() == 0).repeat_interleave(8, -1)
    return {
        "data": to_words(data.masked_fill(zero, 0), MOVES),
        "scale": whole_rows(wider_exponents(scale), SCALED // 16),
        "row_scale": row_scale,
    }


def _mxfp4(data: torch.Tensor, scale: torch.Tensor) -> Parts:
    return {"data": to_words(data, MOVES), "scale": whole_rows(scale.clamp(max=INFINITE), SCALED // 32)}


def _int_group(
    data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *, target: IntWords
) -> Parts:
    factor = scale.float()
    return target.parts_of(data, factor, None if zero is None else (8 - zero.float()) * factor)


def _in_words(data: torch.Tensor, *, split: Callable[..., Codes], target: IntWords) -> Parts:
    codes, factor, offset = split(data)
    return target.parts_of(codes.flatten(1), factor.flatten(1), None if offset is None else offset.flatten(1))


def _q4_0(data: torch.Tensor) -> Codes:
    return pack_nibbles(fields(data[..., 2:], 16, NIBBLES)), _half(data, 0), None


def _q4_1(data: torch.Tensor) -> Codes:
    factor = _half(data, 0)
    return pack_nibbles(fields(data[..., 4:], 16, NIBBLES)), factor, _offset(factor, _half(data, 2), 4)


def _q8_0(data: torch.Tensor) -> Parts:
    return {"data": data[..., 2:] ^ 128, "scale": data[..., :2].contiguous()}


def _legacy(data: torch.Tensor, *, bits: int, minimum: bool) -> Parts:
    """Q5_0, Q5_1 and IQ4_NL: factor, perhaps minimum, perhaps fifth bits, nibbles."""
    parts = {"low": pack_plane(fields(data[..., -16:], 16, NIBBLES), 4), "scale": data[..., :2].contiguous()}
    if minimum:
        parts["scale"] = _centred(_half(data, 0), _half(data, 2), bits)
    if bits == 5:
        parts["high"] = pack_plane(fields(data[..., -20:-16], 1, BITS), 1)
    return parts


def _q2_k(data: torch.Tensor) -> Parts:
    low = pack_plane(fields(data[..., 16:80], 32, CRUMBS), 2)
    return {"low": low, "scale": data[..., :16], "super": data[..., 80:84].contiguous()}


def _q3_k(data: torch.Tensor) -> Parts:
    low, high = fields(data[..., 96:104], 8, NIBBLES), fields(data[..., 104:108], 4, CRUMBS)
    return {
        "low": pack_plane(fields(data[..., 32:96], 32, CRUMBS), 2),
        "high": pack_plane(fields(data[..., :32], 32, BITS), 1),
        "scale": (low | high << 4).to(torch.int8) - 32,
        "super": _half(data, 108),
    }


def _q4_k(data: torch.Tensor) -> Codes:
    factor, minimum = _factor_and_minimum(data)
    return pack_nibbles(fields(data[..., 16:], 32, NIBBLES)), factor, _offset(factor, minimum, 4)


def _q5_k(data: torch.Tensor) -> Parts:
    return {
        "low": pack_plane(fields(data[..., 48:], 32, NIBBLES), 4),
        "high": pack_plane(fields(data[..., 16:48], 32, BITS), 1),
        "scale": _centred(*_factor_and_minimum(data), 5),
    }


def _factor_and_minimum(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K, of each 32 columns."""
    factors, minima = factors_and_minima(data[..., 4:16])
    return _half(data, 0) * factors, _half(data, 2) * -minima


def _q6_k(data: torch.Tensor) -> Parts:
    return {
        "low": pack_plane(fields(data[..., :128], 64, NIBBLES), 4),
        "high": pack_plane(fields(data[..., 128:192], 32, CRUMBS), 2),
        "scale": data[..., 192:208],
        "super": _half(data, 208),
    }


def _iq4_xs(data: torch.Tensor) -> Parts:
    low, high = fields(data[..., 4:8], 1, NIBBLES), fields(data[..., 2:4], 1, CRUMBS)
    return {
        "low": pack_plane(fields(data[..., 8:], 16, NIBBLES), 4),
        "scale": (low | high << 4).to(torch.int8) - 32,
        "super": _half(data, 0),
    }


def _ternary(data: torch.Tensor, *, type: Type) -> Codes:
    """TQ1_0, TQ2_0 and Q1_0: numbers are 1, 0 or -1 times their block's factor; in TQ2_0 2 could be, too."""
    factor = _half(data, {Type.TQ1_0: 52, Type.TQ2_0: 64, Type.Q1_0: 0}[type])
    codes = torch.where(factor == 0, 0.0, DECODERS[type](data) / factor).int() + 8
    return pack_nibbles(codes.to(torch.uint8)), factor, None


def _looked_up(data: torch.Tensor, *, type: Type, bits: int) -> Parts:
    """Of the types with tables those whose entries make codes of 5 or 6 bits."""
    looked = CODEBOOKS[type](data)
    codes = looked.codes + (1 << bits - 1)
    return {
        "low": pack_plane(codes & 15, 4),
        "high": pack_plane(codes >> 4, bits - 4),
        "scale": looked.factors.to(torch.int8),
        "super": looked.unit,
    }


def _iq2(data: torch.Tensor, *, type: Type) -> Parts:
    looked = CODEBOOKS[type](data)
    return {"data": looked.codes.view(torch.uint8) ^ 128, "scale": (looked.unit * looked.factors).bfloat16()}


def _centred(factor: torch.Tensor, minimum: torch.Tensor, bits: int) -> torch.Tensor:
    """Factors and offsets, alternating."""
    return torch.stack((factor, _offset(factor, minimum, bits)), -1).flatten(-2).bfloat16()


def _offset(factor: torch.Tensor, minimum: torch.Tensor, bits: int) -> torch.Tensor:
    """Of codes minus half their range."""
    return minimum + (1 << bits - 1) * factor


def _half(data: torch.Tensor, start: int) -> torch.Tensor:
    """fp32 [..., 1] of the fp16 at byte `start`."""
    return data[..., start : start + 2].contiguous().view(torch.float16).float()


_Packer = tuple[Format, Callable[..., Parts]]
# Columns that share a factor; before these, bits of a code.
_TERNARY = ((Type.TQ1_0, 256), (Type.TQ2_0, 256), (Type.Q1_0, 128))
_LOOKED_UP = ((Type.IQ1_S, 5, 32), (Type.IQ1_M, 5, 16), (Type.IQ3_XXS, 6, 32), (Type.IQ3_S, 5, 32))
_IQ2 = ((Type.IQ2_XXS, 32), (Type.IQ2_XS, 16), (Type.IQ2_S, 16))


def _words(target: IntWords, split: Callable[..., Codes]) -> _Packer:
    return target, partial(_in_words, split=split, target=target)


def _larger(form: Format, split: Callable[..., Parts], type: Type, **more: int) -> _Packer:
    return form, partial(split, type=type, **more)


_PACKERS: Mapping[Type, _Packer] = MappingProxyType(
    {
        Type.Q4_0: _words(IntWords(32, centred=False), _q4_0),
        Type.Q8_0: (IntGroup(8, 32, False, torch.float16), _q8_0),
        Type.Q4_1: _words(IntWords(32, centred=True), _q4_1),
        Type.Q5_0: (Planes("q5_0", 4, 1, 32, "number"), partial(_legacy, bits=5, minimum=False)),
        Type.Q5_1: (Planes("q5_1", 4, 1, 32, "centred"), partial(_legacy, bits=5, minimum=True)),
        Type.IQ4_NL: (
            Planes("iq4_nl", 4, 0, 32, "number", table=True),
            partial(_legacy, bits=4, minimum=False),
        ),
        Type.Q2_K: (Planes("q2_k", 2, 0, 16, "super_nibble"), _q2_k),
        Type.Q3_K: (Planes("q3_k", 2, 1, 16, "super"), _q3_k),
        Type.Q4_K: _words(IntWords(32, centred=True), _q4_k),
        Type.Q5_K: (Planes("q5_k", 4, 1, 32, "centred"), _q5_k),
        Type.Q6_K: (Planes("q6_k", 4, 2, 16, "super"), _q6_k),
        Type.IQ4_XS: (Planes("iq4_xs", 4, 0, 32, "super", table=True), _iq4_xs),
        # Larger than in the files, so that the same kernels read them.
        **{
            type: _words(IntWords(group, centred=True), partial(_ternary, type=type))
            for type, group in _TERNARY
        },
        **{
            type: _larger(Planes(type.name.lower(), 4, bits - 4, group, "super"), _looked_up, type, bits=bits)
            for type, bits, group in _LOOKED_UP
        },
        **{type: _larger(IntGroup(8, group, False, torch.bfloat16), _iq2, type) for type, group in _IQ2},
    }
)
