"""Blocks of ggml's tensor types, decoded in torch: `DECODERS` by type.

Each decoder takes the blocks uint8 [..., N, bytes of a block] and gives fp32 [..., N, elements of a block].
Layouts: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h; the order of the
operations is that of the package `gguf`, so that the values are equal to the last bit.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from gguf import GGMLQuantizationType as Type

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BITS = tuple(range(8))
CRUMBS = (0, 2, 4, 6)
NIBBLES = (0, 4)


def fields(packed: torch.Tensor, group: int, shifts: tuple[int, ...]) -> torch.Tensor:
    """The bit fields of the bytes [..., k], uint8 [..., k * len(shifts)].

    Of each `group` bytes, first all their fields at the first shift, then all at the next.
    """
    shift = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    fields = packed.unflatten(-1, (-1, 1, group)) >> shift & (1 << 8 // len(shifts)) - 1
    return fields.flatten(-3)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """fp32 [..., N, 1] of the fp16 at byte `start`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _scaled(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each of the scales [..., n] times its share of the values [..., n * k]."""
    return (scales[..., None] * values.unflatten(-1, (scales.shape[-1], -1))).flatten(-2)


def _table(entries: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.float32, device=codes.device)[codes.long()]


def _legacy(blocks: torch.Tensor, *, bits: int, minimum: bool) -> torch.Tensor:
    """Q4_0, Q4_1, Q5_0, Q5_1: a factor, perhaps a minimum, perhaps 32 fifth bits, 32 nibbles."""
    codes = fields(blocks[..., -16:], 16, NIBBLES)
    if bits == 5:
        codes = codes | fields(blocks[..., -20:-16], 1, BITS) << 4
    if minimum:
        return _half(blocks, 0) * codes.float() + _half(blocks, 2)
    return _half(blocks, 0) * (codes.float() - (1 << bits - 1))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks[..., :16], fields(blocks[..., 16:80], 32, CRUMBS)
    factors = _half(blocks, 80) * (scales & 15).float()
    minima = _half(blocks, 82) * (scales >> 4).float()
    return _scaled(factors, codes.float()) - minima.repeat_interleave(16, -1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = fields(blocks[..., 32:96], 32, CRUMBS).float()
    # The third bit says that 4 is not to be subtracted.
    codes = codes - 4 * (1 - fields(blocks[..., :32], 32, BITS).float())
    low = fields(blocks[..., 96:104], 8, NIBBLES)
    high = fields(blocks[..., 104:108], 4, CRUMBS)
    return _scaled(_half(blocks, 108) * ((low | high << 4).float() - 32), codes)


def factors_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 factors and 8 minima, 6 bits each, that Q4_K and Q5_K pack into 12 bytes."""
    low, middle, mixed = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), -1)
    minima = torch.cat((middle & 63, mixed >> 4 | middle >> 6 << 4), -1)
    return factors.float(), minima.float()


def _q45_k(blocks: torch.Tensor, *, bits: int) -> torch.Tensor:
    codes = fields(blocks[..., -128:], 32, NIBBLES)
    if bits == 5:
        codes = codes | fields(blocks[..., 16:48], 32, BITS) << 4
    factors, minima = factors_and_minima(blocks[..., 4:16])
    offsets = (_half(blocks, 2) * minima).repeat_interleave(32, -1)
    return _scaled(_half(blocks, 0) * factors, codes.float()) - offsets


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = fields(blocks[..., :128], 64, NIBBLES) | fields(blocks[..., 128:192], 32, CRUMBS) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _scaled(_half(blocks, 208) * scales, codes.float() - 32)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _table(IQ4_NL, fields(blocks[..., 2:], 16, NIBBLES))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = fields(blocks[..., 4:8], 1, NIBBLES)
    high = fields(blocks[..., 2:4], 1, CRUMBS)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return _scaled(scales, _table(IQ4_NL, fields(blocks[..., 8:], 16, NIBBLES)))


def _trits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """`count` digits of base 3 of each byte: first the first digits of all bytes, then the second ones."""
    powers = torch.tensor([3**n for n in range(count)], dtype=torch.uint8, device=packed.device)[:, None]
    # Multiplied modulo 256, the digit wanted is the first; times 3, it stands above the byte.
    return ((packed[..., None, :] * powers).int() * 3 >> 8).flatten(-2)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    digits = (_trits(blocks[..., :32], 5), _trits(blocks[..., 32:48], 5), _trits(blocks[..., 48:52], 4))
    return _half(blocks, 52) * (torch.cat(digits, -1).float() - 1)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 64) * (fields(blocks[..., :64], 32, CRUMBS).float() - 1)


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (2 * fields(blocks[..., 2:], 1, BITS).float() - 1)


DECODERS: Mapping[Type, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        Type.Q4_0: partial(_legacy, bits=4, minimum=False),
        Type.Q4_1: partial(_legacy, bits=4, minimum=True),
        Type.Q5_0: partial(_legacy, bits=5, minimum=False),
        Type.Q5_1: partial(_legacy, bits=5, minimum=True),
        Type.Q8_0: _q8_0,
        Type.Q2_K: _q2_k,
        Type.Q3_K: _q3_k,
        Type.Q4_K: partial(_q45_k, bits=4),
        Type.Q5_K: partial(_q45_k, bits=5),
        Type.Q6_K: _q6_k,
        Type.IQ4_NL: _iq4_nl,
        Type.IQ4_XS: _iq4_xs,
        Type.TQ1_0: _tq1_0,
        Type.TQ2_0: _tq2_0,
        Type.Q1_0: _q1_0,
    }
)
