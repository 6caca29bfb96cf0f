"""What the instructions that expand words make of them: Triton's interpreter has others."""

import pytest
import torch

from moebius_kernels.formats.e2m1_words import to_words
from moebius_kernels.triton.decode_asm import e2m1_words, word_factors
from tests.kernels.triton.ptx import bf16, run

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
# Of 32 columns, all codes twice, so that each place of a word has several.
CODES = [(5 * column + column // 16) % 16 for column in range(32)]


def words() -> list[int]:
    data = torch.tensor([CODES[i] | CODES[i + 1] << 4 for i in range(0, 32, 2)], dtype=torch.uint8)
    return [word & 0xFFFFFFFF for word in to_words(data).view(torch.int32).tolist()]


def check(factors_word, scales):
    """`scales`: of the first 16 columns and of the others."""
    for index, word in enumerate(words()):
        found = run(e2m1_words(), {"$8": word, "$9": factors_word})
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
