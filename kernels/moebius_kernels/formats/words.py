"""The order of 4-bit codes that GPU kernels expand in registers, and the lengths of rows that they copy.

Of each 32 columns there are four little-endian words. Word w has columns 8 p + 2 w and, in its high half,
8 p + 2 w + 1 for p = 0 to 3: in products of the tensor cores one thread has all of these. Where in a half the
bits of the four codes are is the form's own: moves for each p, which are shifts to the left and masks of what
is shifted.
"""

import functools
from collections.abc import Sequence

import torch

from moebius_kernels.formats.codes import pack_nibbles, unpack_nibbles

# Columns of four words, and those that a row of factors is a multiple of.
CODED = 32
SCALED = 256

Moves = Sequence[Sequence[tuple[int, int]]]


def whole_rows(part: torch.Tensor, items: int) -> torch.Tensor:
    """[..., n] with zeros up to a multiple of `items`."""
    return torch.nn.functional.pad(part, (0, -part.shape[-1] % items))


def to_words(data: torch.Tensor, moves: Moves) -> torch.Tensor:
    """uint8 [..., n] with a code a nibble, the low one first -> the same in words, for whole 32 columns."""
    codes = unpack_nibbles(whole_rows(data, CODED // 2))
    # From [pair, word, half] to [word, half] for each pair.
    pairs = codes.unflatten(-1, (-1, 4, 4, 2)).int()
    placed = (
        (pairs[..., pair, :, :] & mask) << shift for pair, own in enumerate(moves) for shift, mask in own
    )
    halves = functools.reduce(torch.bitwise_or, placed)
    return torch.stack((halves & 255, halves >> 8), -1).to(torch.uint8).flatten(-4)


def from_words(words: torch.Tensor, moves: Moves) -> torch.Tensor:
    """The inverse of `to_words`, still for whole 32 columns."""
    halves = words.view(torch.int16).unflatten(-1, (-1, 4, 2))
    pairs = [
        functools.reduce(torch.bitwise_or, (halves >> shift & mask for shift, mask in own)) for own in moves
    ]
    return pack_nibbles(torch.stack(pairs, -3).flatten(-4).to(torch.uint8))
