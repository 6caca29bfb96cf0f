"""Codes in the order of `formats/words.py`, expanded in registers.

A thread has one of the four words of 32 columns. Where products are those of four warps, these are just the
thread's columns: the tile's can be in their order (IN_ORDER), and no number moves. In products of single
warps Triton gives a thread eight columns side by side: there a tile has its columns in the order of the
words, and x, which comes from shared memory, is read in that order (`by_words`).
"""

import triton
import triton.language as tl

from moebius_kernels.formats.e2m1_words import INFINITE
from moebius_kernels.formats.words import SCALED
from moebius_kernels.triton import decode_asm

_INFINITE = tl.constexpr(INFINITE)
# By code, and what its factors are.
_EXPANSIONS = {
    ("nvfp4_words", "byte"): decode_asm.e2m1_words(),
    ("mxfp4_words", "byte"): decode_asm.e2m1_words(),
    ("int4_words", "number"): decode_asm.int_words(False),
    ("int4_words", "centred"): decode_asm.int_words(True),
}
# Factors in a word of these: NVFP4's two of 32 columns, and a factor and its offset, count as one.
_PER_WORD = {
    ("nvfp4_words", "byte"): 2,
    ("mxfp4_words", "byte"): 4,
    ("int4_words", "number"): 2,
    ("int4_words", "centred"): 1,
}
# By code, and how many factors a word has.
_FACTORS = {
    ("nvfp4_words", 1): decode_asm.word_factors("e4m3", 1),
    ("nvfp4_words", 2): decode_asm.word_factors("e4m3", 2),
    ("mxfp4_words", 1): decode_asm.word_factors("e8m0", 1),
    ("mxfp4_words", 4): decode_asm.word_factors("e8m0", 4),
    ("int4_words", 2): decode_asm.halves(),
}
# As in `decode.py`.
_LOOKED_UP = tl.constexpr(repr((SCALED, _EXPANSIONS, _PER_WORD, _FACTORS)))


@triton.constexpr_function
def is_words(code: str) -> bool:
    return code.endswith("_words")


@triton.constexpr_function
def per_word(code: str, scales: str) -> int:
    return _PER_WORD[code, scales]


@triton.constexpr_function
def columns_of_word(code: str, scales: str, group: int) -> int:
    """Columns that a word of factors is for. Of smaller groups, NVFP4's, those of 32 count as one."""
    return _PER_WORD[code, scales] * max(group, 32)


@triton.constexpr_function
def words_of_row(columns: int, of_word: int) -> int:
    """Words of factors that a row has, `of_word` columns each."""
    whole = max(SCALED, of_word)
    return -(-columns // whole) * whole // of_word


@triton.constexpr_function
def _expansion(code: str, scales: str) -> str:
    return _EXPANSIONS[code, scales]


@triton.constexpr_function
def _unpacking(code: str, count: int) -> str:
    return _FACTORS[code, count]


@triton.jit
def by_words(x, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """[TOKENS, COLUMNS], the columns in the order in which words have them."""
    return x.reshape(TOKENS, COLUMNS // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(TOKENS, COLUMNS)


@triton.jit
def word_factors(words, COUNT: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """int32 [ROWS, n], each with COUNT factors (`per_word`), -> [ROWS, COUNT n] for `expanded`."""
    tl.static_assert(_LOOKED_UP != "")
    if CODE == "int4_words" and COUNT == 1:
        factors = words
    elif not ASM:
        BITS: tl.constexpr = 8 if CODE == "mxfp4_words" else 16
        shift = tl.arange(0, COUNT) * BITS
        factors = (words[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)
    elif COUNT == 1:
        factors = tl.inline_asm_elementwise(
            _unpacking(CODE, 1), "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    elif COUNT == 2:
        a, b = tl.inline_asm_elementwise(
            _unpacking(CODE, 2), "=&r,=&r,r", [words], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
        factors = tl.join(a, b)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _unpacking(CODE, 4), "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        factors = tl.join(tl.join(a, c), tl.join(b, d))
    return factors.reshape(ROWS, words.shape[1] * COUNT)


@triton.jit
def spread(values, ROWS: tl.constexpr, HAS: tl.constexpr, WANTED: tl.constexpr):
    """[ROWS, HAS] -> [ROWS, WANTED], each value next to its copies."""
    if HAS == WANTED:
        found = values
    else:
        found = tl.broadcast_to(values[:, :, None], (ROWS, HAS, WANTED // HAS)).reshape(ROWS, WANTED)
    return found


@triton.jit
def expanded(
    words, factors,
    CODE: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of the words [ROWS, COLUMNS / 8] and `word_factors`'s [ROWS, groups]; bf16 if ASM,
    of E2M1 times 2^-8, else fp32."""
    GROUPS: tl.constexpr = COLUMNS // 32
    if ASM:
        s = spread(factors, ROWS, factors.shape[1], 4 * GROUPS)
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _expansion(CODE, SCALES), "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, s], dtype=(tl.bfloat16,) * 8,
            is_pure=True, pack=1,
        )  # fmt: skip
        tile = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
        tile = tile.reshape(ROWS, GROUPS, 4, 4, 2)
    else:
        words = words.reshape(ROWS, GROUPS, 4)[:, :, :, None, None]
        half = (words >> (tl.arange(0, 2)[None, None, None, None, :] * 16)) & 0xFFFF
        factors = spread(factors, ROWS, factors.shape[1], GROUPS)[:, :, None, None, None]
        if CODE == "int4_words":
            tile = _plain_integers(half, factors, SCALES)
        else:
            tile = _plain_e2m1(half, factors, CODE)
    if IN_ORDER:
        tile = tile.permute(0, 1, 3, 2, 4)
    return tile.reshape(ROWS, COLUMNS)


@triton.jit
def _plain_integers(half, factors, SCALES: tl.constexpr):
    """fp32 [ROWS, groups of columns, 4 words, 4 pairs, 2]"""
    code = (half >> (4 * tl.arange(0, 4)[None, None, None, :, None])) & 15
    number = (code.to(tl.float32) - 8) * (factors << 16).to(tl.float32, bitcast=True)
    if SCALES == "centred":
        number += (factors & -65536).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _plain_e2m1(half, factors, CODE: tl.constexpr):
    """As `_plain_integers`."""
    pair = tl.arange(0, 4)[None, None, None, :, None]
    shifted = half << (3 * pair)
    near = ((shifted >> 12) & 8) | ((shifted >> 6) & 7)
    last = ((half >> 11) & 8) | ((half >> 11) & 4) | ((half >> 10) & 3)
    code = tl.where(pair < 3, near, last)
    number = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
    if CODE == "nvfp4_words":
        byte = (factors >> (pair // 2 * 8)) & 0xFF
        bits = (byte << 20) + (112 << 23)
    else:
        # 2^-127 is a denormal number.
        bits = tl.where(factors == 0, 1 << 22, tl.where(factors == _INFINITE, 255, factors) << 23)
    return number * bits.to(tl.float32, bitcast=True)
