"""What the instructions that expand words make of them: Triton's interpreter has others."""

import pytest
import torch

from moebius_kernels.formats import e2m1_words, int_words
from moebius_kernels.formats.words import Moves, to_words
from moebius_kernels.triton import decode_asm
from moebius_kernels.triton.decode_asm import word_factors
from tests.kernels.triton.ptx import bf16, run

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
# Of 32 columns, all codes twice, so that each place of a word has several.
CODES = [(5 * column + column // 16) % 16 for column in range(32)]


def words(moves: Moves) -> list[int]:
    data = torch.tensor([CODES[i] | CODES[i + 1] << 4 for i in range(0, 32, 2)], dtype=torch.uint8)
    return [word & 0xFFFFFFFF for word in to_words(data, moves).view(torch.int32).tolist()]


def check(factors_word, scales):
    """`scales`: of the first 16 columns and of the others."""
    for index, word in enumerate(words(e2m1_words.MOVES)):
        found = run(decode_asm.e2m1_words(), {"$8": word, "$9": factors_word})
        for output in range(8):
            pair, odd = divmod(output, 2)
            code = CODES[8 * pair + 2 * index + odd]
            assert 256 * bf16(found[f"${output}"]) == NUMBERS[code] * scales[pair // 2]


@pytest.mark.parametrize(("count", "index"), [(1, 0), (2, 0), (2, 1)])
def test_nvfp4(count, index):
    # Exponents from 2^-9, the least of E4M3, on to 2^8, and all mantissas.
    for first, last in zip(range(6 * 8, 24 * 8), reversed(range(6 * 8, 24 * 8)), strict=True):
        word = (first | last << 8) << 16 * index | 0xABCD << 16 * (1 - index)
        factors = run(word_factors("e4m3", count), {f"${count}": word})
        check(factors[f"${index}"], [2.0 ** (byte // 8 - 15) * (1 + byte % 8 / 8) for byte in (first, last)])


@pytest.mark.parametrize(("count", "index"), [(1, 0), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_mxfp4(count, index):
    # Where 2^-8 times the least number is still a normal one, up to what becomes infinite.
    for byte in range(10, 137):
        word = byte << 8 * index | 0xA5A5A5A5 & ~(255 << 8 * index)
        factors = run(word_factors("e8m0", count), {f"${count}": word})
        check(factors[f"${index}"], [2.0 ** (byte - 127)] * 2)
    factors = run(word_factors("e8m0", count), {f"${count}": 137 << 8 * index})
    assert bf16(factors[f"${index}"] & 0xFFFF) == float("inf")


@pytest.mark.parametrize("affine", [False, True])
def test_integers(affine):
    """Each number is rounded once, as `fma` has it; factors of all signs and sizes."""
    for factor, offset in ((1.0, 0.0), (-0.0234375, 5.5), (2.0**-100, -(2.0**-97)), (1.9921875, -31.75)):
        pair = torch.tensor([factor, offset]).bfloat16()
        word = int(pair.view(torch.int32)) & 0xFFFFFFFF
        for index, codes in enumerate(words(int_words.MOVES)):
            found = run(decode_asm.int_words(affine), {"$8": codes, "$9": word})
            for output in range(8):
                column, odd = divmod(output, 2)
                number = (CODES[8 * column + 2 * index + odd] - 8) * factor + offset * affine
                expected = torch.tensor(number, dtype=torch.float64).bfloat16()
                assert bf16(found[f"${output}"]) == float(expected)


def test_factors_of_two_groups():
    found = run(decode_asm.halves(), {"$2": 0x3F80_4049})
    assert [found[f"${index}"] & 0xFFFF for index in range(2)] == [0x4049, 0x3F80]
