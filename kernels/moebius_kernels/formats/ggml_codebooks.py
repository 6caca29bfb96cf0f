"""Blocks of ggml's types that look up several columns at once: as small integers, and what multiplies them.

Layouts as in `ggml_blocks.py`; the tables are those of the package `gguf`. All products are exact in fp32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

from moebius_kernels.formats.ggml_blocks import BITS, CRUMBS, NIBBLES, fields


@dataclass(frozen=True, slots=True)
class Looked:
    """Of blocks: each number is `unit` * its group's factor * its code.

    `codes` int8 [..., N, 256], `factors` int32 [..., N, 8 or 16], `unit` fp32 [..., N, 1].
    """

    codes: torch.Tensor
    factors: torch.Tensor
    unit: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        scales = self.unit * self.factors.float()
        return (scales[..., None] * self.codes.unflatten(-1, (scales.shape[-1], -1)).float()).flatten(-2)


def _iq2_xxs(blocks: torch.Tensor) -> Looked:
    words = blocks[..., 2:].unflatten(-1, (8, 8))
    word = _integers(words[..., 4:].flatten(-2), 4)
    codes = _signed(_entries("IQ2_XXS", words[..., :4].flatten(-2)), _signs(word))
    return Looked(codes, 2 * (word >> 28).int() + 1, _half(blocks) / 8)


def _iq2_xs(blocks: torch.Tensor) -> Looked:
    pairs = _integers(blocks[..., 2:66], 2)
    codes = _signed(_entries("IQ2_XS", pairs & 511), _even(pairs >> 9))
    return Looked(codes, 2 * fields(blocks[..., 66:], 1, NIBBLES).int() + 1, _half(blocks) / 8)


def _iq2_s(blocks: torch.Tensor) -> Looked:
    index = blocks[..., 2:34].int() | fields(blocks[..., 66:74], 1, CRUMBS).int() << 8
    codes = _signed(_entries("IQ2_S", index), blocks[..., 34:66])
    return Looked(codes, 2 * fields(blocks[..., 74:], 1, NIBBLES).int() + 1, _half(blocks) / 8)


def _iq3_xxs(blocks: torch.Tensor) -> Looked:
    word = _integers(blocks[..., 66:], 4)
    # The entries are even.
    codes = _signed(_entries("IQ3_XXS", blocks[..., 2:66]) // 2, _signs(word))
    return Looked(codes, 2 * (word >> 28).int() + 1, _half(blocks) / 2)


def _iq3_s(blocks: torch.Tensor) -> Looked:
    index = blocks[..., 2:66].int() | fields(blocks[..., 66:74], 1, BITS).int() << 8
    codes = _signed(_entries("IQ3_S", index), blocks[..., 74:106])
    return Looked(codes, 2 * fields(blocks[..., 106:], 1, NIBBLES).int() + 1, _half(blocks))


def _iq1_s(blocks: torch.Tensor) -> Looked:
    words = _integers(blocks[..., 34:], 2)
    index = blocks[..., 2:34].int() | (_thirds(words) & 7) << 8
    codes = _shifted(_entries("IQ1_S", index), words >> 15)
    return Looked(codes, 2 * (words >> 12 & 7) + 1, _half(blocks) / 8)


def _iq1_m(blocks: torch.Tensor) -> Looked:
    nibbles = fields(blocks[..., 32:48], 1, NIBBLES).int()
    words = _integers(blocks[..., 48:], 2)
    index = blocks[..., :32].int() | (nibbles & 7) << 8
    codes = _shifted(_entries("IQ1_M", index), nibbles >> 3)
    # Of the fp16, each word has four bits on top of four factors.
    places = torch.tensor((0, 4, 8, 12), device=blocks.device)
    half = ((words >> 12) << places).sum(-1, keepdim=True)
    unit = half.to(torch.int16).view(torch.float16).float() / 8
    return Looked(codes, 2 * (_thirds(words) & 7) + 1, unit)


def _half(blocks: torch.Tensor) -> torch.Tensor:
    """fp32 [..., N, 1] of the fp16 at the beginning."""
    return blocks[..., :2].contiguous().view(torch.float16).float()


def _integers(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian integers of so many bytes; int64 if there are four, else int32."""
    place = torch.arange(0, 8 * size, 8, device=packed.device)
    found = (packed.unflatten(-1, (-1, size)).long() << place).sum(-1)
    return found if size == 4 else found.int()


def _entries(name: str, index: torch.Tensor) -> torch.Tensor:
    """int8 [..., n * columns of an entry]: what stands in the type's table."""
    codebook = getattr(quants, name)
    codebook.init_grid()
    table = torch.from_numpy(codebook.grid).to(index.device, torch.int8).view(codebook.grid_shape)
    return table.index_select(0, index.flatten().int()).view(*index.shape[:-1], -1)


def _thirds(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., 4 n]: each word, and what is left of it after three, six and nine bits."""
    return (words[..., None] >> torch.tensor((0, 3, 6, 9), device=words.device)).flatten(-2).int()


def _signs(words: torch.Tensor) -> torch.Tensor:
    """Of each word four times seven signs, and an eighth that makes the number of minuses even."""
    return _even((words[..., None] >> torch.tensor((0, 7, 14, 21), device=words.device) & 127).flatten(-2))


def _even(seven: torch.Tensor) -> torch.Tensor:
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return seven | ((odd ^ odd >> 1) & 1) << 7


def _signed(codes: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The codes [..., 8 n] with the signs of the bits [..., n]; 1 is minus."""
    places = torch.arange(8, dtype=torch.uint8, device=signs.device)
    minus = (signs.to(torch.uint8)[..., None] >> places & 1).view(torch.int8)
    return (codes.unflatten(-1, (-1, 8)) * (1 - 2 * minus)).flatten(-2)


def _shifted(codes: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Eight times the codes, less 1 where `down` [..., n] is 1, else more; it has as many columns each."""
    shift = (1 - 2 * down[..., None]).to(torch.int8)
    return (8 * codes.unflatten(-1, (down.shape[-1], -1)) + shift).flatten(-2)


CODEBOOKS: Mapping[Type, Callable[[torch.Tensor], Looked]] = MappingProxyType(
    {
        Type.IQ1_S: _iq1_s,
        Type.IQ1_M: _iq1_m,
        Type.IQ2_XXS: _iq2_xxs,
        Type.IQ2_XS: _iq2_xs,
        Type.IQ2_S: _iq2_s,
        Type.IQ3_XXS: _iq3_xxs,
        Type.IQ3_S: _iq3_s,
    }
)
