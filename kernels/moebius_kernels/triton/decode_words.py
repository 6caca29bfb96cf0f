"""E2M1 codes in the order of `formats/e2m1_words.py`, expanded in registers.

A thread has one of the four words of 32 columns. Where products are those of four warps, these are just the
thread's columns: the tile's can be in their order (IN_ORDER), and no number moves. In products of single
warps Triton gives a thread eight columns side by side: there a tile has its columns in the order of the
words, and x, which comes from shared memory, is read in that order (`by_words`).
"""

import triton
import triton.language as tl

from moebius_kernels.formats.e2m1_words import INFINITE
from moebius_kernels.triton import decode_asm

_INFINITE = tl.constexpr(INFINITE)
_E2M1_ASM = tl.constexpr(decode_asm.e2m1_words())
# By code, and how many factors a word has.
_FACTORS = {
    ("nvfp4_words", 1): decode_asm.word_factors("e4m3", 1),
    ("nvfp4_words", 2): decode_asm.word_factors("e4m3", 2),
    ("mxfp4_words", 1): decode_asm.word_factors("e8m0", 1),
    ("mxfp4_words", 4): decode_asm.word_factors("e8m0", 4),
}
# As in `decode.py`.
_LOOKED_UP = tl.constexpr(repr(_FACTORS))


@triton.constexpr_function
def is_words(code: str) -> bool:
    return (code, 1) in _FACTORS


@triton.constexpr_function
def _assembly(code: str, count: int) -> str:
    return _FACTORS[code, count]


@triton.jit
def by_words(x, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """[TOKENS, COLUMNS], the columns in the order in which words have them."""
    return x.reshape(TOKENS, COLUMNS // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(TOKENS, COLUMNS)


@triton.jit
def word_factors(words, COUNT: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """int32 [ROWS, n], each with the factors of COUNT times 32 columns, -> [ROWS, COUNT n] for `expanded`."""
    tl.static_assert(_LOOKED_UP != "")
    if not ASM:
        BITS: tl.constexpr = 16 if CODE == "nvfp4_words" else 8
        shift = tl.arange(0, COUNT) * BITS
        factors = (words[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)
    elif COUNT == 1:
        factors = tl.inline_asm_elementwise(
            _assembly(CODE, 1), "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    elif COUNT == 2:
        a, b = tl.inline_asm_elementwise(
            _assembly(CODE, 2), "=&r,=&r,r", [words], dtype=(tl.int32,) * 2, is_pure=True, pack=1
        )
        factors = tl.join(a, b)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _assembly(CODE, 4), "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
        factors = tl.join(tl.join(a, c), tl.join(b, d))
    return factors.reshape(ROWS, words.shape[1] * COUNT)


@triton.jit
def expanded(
    words, factors,
    CODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of the words [ROWS, COLUMNS / 8] and `word_factors`'s [ROWS, COLUMNS / 32]; bf16 times
    2^-8 if ASM, else fp32."""
    GROUPS: tl.constexpr = COLUMNS // 32
    if ASM:
        s = tl.broadcast_to(factors[:, :, None], (ROWS, GROUPS, 4)).reshape(ROWS, 4 * GROUPS)
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _E2M1_ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, s], dtype=(tl.bfloat16,) * 8,
            is_pure=True, pack=1,
        )  # fmt: skip
        tile = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
        tile = tile.reshape(ROWS, GROUPS, 4, 4, 2)
    else:
        tile = _plain(words, factors, CODE, ROWS, GROUPS)
    if IN_ORDER:
        tile = tile.permute(0, 1, 3, 2, 4)
    return tile.reshape(ROWS, COLUMNS)


@triton.jit
def _plain(words, factors, CODE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """fp32 [ROWS, GROUPS, 4 words, 4 pairs, 2]"""
    words = words.reshape(ROWS, GROUPS, 4)[:, :, :, None, None]
    pair = tl.arange(0, 4)[None, None, None, :, None]
    half = (words >> (tl.arange(0, 2)[None, None, None, None, :] * 16)) & 0xFFFF
    shifted = half << (3 * pair)
    near = ((shifted >> 12) & 8) | ((shifted >> 6) & 7)
    last = ((half >> 11) & 8) | ((half >> 11) & 4) | ((half >> 10) & 3)
    code = tl.where(pair < 3, near, last)
    number = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
    factors = factors[:, :, None, None, None]
    if CODE == "nvfp4_words":
        byte = (factors >> (pair // 2 * 8)) & 0xFF
        bits = (byte << 20) + (112 << 23)
    else:
        # 2^-127 is a denormal number.
        bits = tl.where(factors == 0, 1 << 22, tl.where(factors == _INFINITE, 255, factors) << 23)
    return number * bits.to(tl.float32, bitcast=True)
