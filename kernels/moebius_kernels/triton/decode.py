"""Tiles of weight matrices, read in their stored forms and expanded to bf16 in registers.

What a form needs is told by constants: CODE, how codes become numbers; SCALES, what multiplies them inside
the loop over the columns; GROUP, how many columns share a factor. `layouts.py` has them for each form.
ASM: with the instructions of `decode_asm.py`, else in plain Triton, as its interpreter needs it.
"""

import triton
import triton.language as tl

from moebius_kernels.formats.ggml_blocks import IQ4_NL
from moebius_kernels.formats.words import CODED
from moebius_kernels.triton import decode_asm
from moebius_kernels.triton.decode_words import (
    columns_of_word,
    expanded,
    is_words,
    per_word,
    spread,
    word_factors,
    words_of_row,
)

# Bits of a code: in its low plane, in its high one. Codes of 8 bits are read four a word, others eight.
_BITS = {
    "nvfp4": (4, 0),
    "mxfp4": (4, 0),
    "nvfp4_words": (4, 0),
    "mxfp4_words": (4, 0),
    "int4_words": (4, 0),
    "iq4_nl": (4, 0),
    "int2": (2, 0),
    "int3": (2, 1),
    "int4": (4, 0),
    "int5": (4, 1),
    "int6": (4, 2),
    "int8": (8, 0),
    "e4m3": (8, 0),
}
# E4M3's exponent bias, in bf16's.
_E4M3_FACTOR = tl.constexpr(2.0**120)
_SUPER = tl.constexpr(256)
_BOTH_BF16 = tl.constexpr(decode_asm.BOTH_BF16)


@triton.constexpr_function
def low_bits(code: str) -> int:
    return _BITS[code][0]


@triton.constexpr_function
def high_bits(code: str) -> int:
    return _BITS[code][1]


@triton.constexpr_function
def codes_an_element(code: str) -> int:
    """How many columns an element of the low plane has."""
    return 1 if code == "bf16" else 4 if _BITS[code][0] == 8 else 8


@triton.constexpr_function
def codes_of_row(code: str, columns: int) -> int:
    """Elements of the low plane, or numbers that a row has."""
    whole = CODED if code.endswith("_words") else 1
    return -(-columns // whole) * whole // codes_an_element(code)


@triton.constexpr_function
def half_range(code: str) -> int:
    return 1 << sum(_BITS[code]) - 1


@triton.constexpr_function
def accumulator_factor(code: str, asm: bool) -> float:
    """What a product has to be multiplied by, because the tile was not."""
    return 256.0 if asm and is_e2m1(code) else 1.0


@triton.constexpr_function
def is_e2m1(code: str) -> bool:
    return "fp4" in code


@triton.constexpr_function
def is_affine(scales: str) -> bool:
    return scales in ("zero", "centred", "super_nibble")


def _assemblies() -> dict[tuple[str, bool], str]:
    special = {
        "nvfp4": decode_asm.e2m1_codes("e4m3"),
        "mxfp4": decode_asm.e2m1_codes("e8m0"),
        "iq4_nl": decode_asm.iq4_nl_codes(),
        "e4m3": decode_asm.e4m3_codes(),
    }
    found = {(code, False): text for code, text in special.items()}
    for affine in (False, True):
        found["int8", affine] = decode_asm.byte_codes(affine)
        for code, (low, high) in _BITS.items():
            if code not in special and code != "int8" and not code.endswith("_words"):
                found[code, affine] = decode_asm.int_codes(low, high, affine)
    return found


# By code, and whether there are offsets.
_ASSEMBLY = _assemblies()
# Triton knows a compiled kernel by the constants that its functions name, and not by what they look up.
_LOOKED_UP = tl.constexpr(repr((CODED, _BITS, _ASSEMBLY)))


@triton.constexpr_function
def _assembly(code: str, affine: bool) -> str:
    return _ASSEMBLY[code, affine]


@triton.constexpr_function
def _constraints(outputs: int, inputs: int) -> str:
    return ",".join(["=h"] * outputs + ["r"] * inputs)


@triton.constexpr_function
def _table(entry: int) -> int:
    return IQ4_NL[entry]


@triton.jit
def load_tile(
    codes, high, scale, extra, hint, row, block_row, column,
    C: tl.constexpr, EVEN: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr, POLICY: tl.constexpr,
    WIDE: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """bf16 (fp32 without ASM) [ROWS, COLUMNS]: columns from `column` on of rows `row` int64; 0 beyond C.

    `hint` from `octet_hint`. `block_row` int64 [ROWS]: the rows of the scales, where rows share them. EVEN:
    no tile goes beyond C. WIDE: scales of a byte are read by fours. IN_ORDER: of forms of words, see
    `decode_words.py`.
    """
    tl.static_assert(_LOOKED_UP != "")
    if CODE == "bf16":
        tile = _load(codes, row, column, C, COLUMNS, EVEN, POLICY)
    elif is_words(CODE):
        words = _load(codes, row, column // 8, codes_of_row(CODE, C), COLUMNS // 8, EVEN, POLICY)
        factors = _word_factors(scale, row, column, C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS, ASM)
        tile = expanded(words + hint, factors, CODE, SCALES, ROWS, COLUMNS, ASM, IN_ORDER)
    else:
        PER: tl.constexpr = codes_an_element(CODE)
        low = _load(codes, row, column // PER, C // PER, COLUMNS // PER, EVEN, POLICY).to(tl.int32)
        if low_bits(CODE) == 2:
            low = low & 0xFFFF
        high_word = low
        if high_bits(CODE) > 0:
            high_word = _load(high, row, column // PER, C // PER, COLUMNS // PER, EVEN, POLICY).to(tl.int32)
            high_word = high_word & ((1 << 8 * high_bits(CODE)) - 1)
        factor, offset = _factors(
            scale, extra, row, block_row, column, C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS, WIDE
        )
        if ASM:
            tile = _assembled(low, high_word, factor, offset, hint, CODE, is_affine(SCALES), ROWS, COLUMNS)
        else:
            tile = _plain(low, high_word, factor, offset, CODE, SCALES, ROWS, COLUMNS)
    return tile


@triton.jit
def octet_hint(codes):
    """int32 [1, 1] of 0, which makes Triton give each thread whole octets of columns.

    How many columns side by side a thread has in a product, Triton derives from the narrowest load that the
    operand depends on: 8 if that is a byte. With fewer, octets would be torn and put together in shared
    memory.
    LLVM sees that this is 0, later, and removes it.
    """
    byte = tl.load(codes.to(tl.pointer_type(tl.uint8)) + tl.zeros((1, 1), tl.int32))
    return byte.to(tl.int32) >> 8


@triton.jit
def _load(
    pointer, row, first, WIDTH: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr
):
    """Elements `first` to `first + COUNT` of the rows, of WIDTH elements each."""
    at = first + tl.arange(0, COUNT)
    pointers = pointer + (row * WIDTH)[:, None] + at[None, :]
    if EVEN:
        found = tl.load(pointers, eviction_policy=POLICY)
    else:
        found = tl.load(pointers, (at < WIDTH)[None, :], 0, eviction_policy=POLICY)
    return found


@triton.jit
def _word_factors(
    scale, row, column,
    C: tl.constexpr, EVEN: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Those of the tile's groups of columns, as `expanded` takes them but for their number."""
    OF_WORD: tl.constexpr = columns_of_word(CODE, SCALES, GROUP)
    WIDTH: tl.constexpr = words_of_row(C, OF_WORD)
    PER: tl.constexpr = per_word(CODE, SCALES)
    if CODE == "int4_words" or COLUMNS >= OF_WORD:
        # Less than a word a thread could not be copied asynchronously.
        COUNT: tl.constexpr = COLUMNS // OF_WORD if COLUMNS > OF_WORD else 1
        words = scale.to(tl.pointer_type(tl.int32))
        found = _load(words, row, column // OF_WORD, WIDTH, COUNT, EVEN, "")
        if COLUMNS < OF_WORD:
            if PER > 1:
                # One of a pair.
                found = found >> (column // GROUP % PER * (32 // PER))
            factors = word_factors(found, 1, CODE, ROWS, ASM)
        else:
            factors = word_factors(found, PER, CODE, ROWS, ASM)
    else:
        one = scale.to(tl.pointer_type(tl.int16)) if CODE == "nvfp4_words" else scale
        found = _load(one, row, column // 32, WIDTH * PER, COLUMNS // 32, EVEN, "").to(tl.int32)
        factors = word_factors(found, 1, CODE, ROWS, ASM)
    return factors


@triton.jit
def _factors(
    scale, extra, row, block_row, column,
    C: tl.constexpr, EVEN: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Factor and offset [ROWS, groups of the tile], fp32; for E2M1 codes the scale bytes, int32.

    value = (code - half its range) * factor + offset
    """
    if SCALES == "none":
        one = tl.full((ROWS, 1), 1.0, tl.float32)
        return one, one
    GROUPS: tl.constexpr = COLUMNS // GROUP if GROUP < COLUMNS and GROUP < C else 1
    WIDTH: tl.constexpr = (C + GROUP - 1) // GROUP
    HALF: tl.constexpr = half_range(CODE)
    at = column // GROUP
    if SCALES == "block":
        number = _load(scale, block_row, at, WIDTH, GROUPS, EVEN, "")
        offset = number
    elif SCALES == "byte":
        if WIDE and WIDTH % 4 == 0 and GROUPS % 4 == 0:
            # Less than a word a thread could not be copied asynchronously.
            words = scale.to(tl.pointer_type(tl.int32))
            four = _load(words, row, at // 4, WIDTH // 4, GROUPS // 4, EVEN, "")
            bytes = (four[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255
            number = bytes.reshape(ROWS, GROUPS)
        else:
            number = _load(scale, row, at, WIDTH, GROUPS, EVEN, "").to(tl.int32) & 255
        offset = number
    elif SCALES == "number":
        number = _load(scale, row, at, WIDTH, GROUPS, EVEN, "").to(tl.float32)
        offset = number
    elif SCALES == "zero":
        number = _load(scale, row, at, WIDTH, GROUPS, EVEN, "").to(tl.float32)
        zero = _load(extra, row, at, WIDTH, GROUPS, EVEN, "").to(tl.float32)
        offset = (HALF - zero) * number
    elif SCALES == "centred":
        pair = _load(scale, row, at, WIDTH, GROUPS, EVEN, "")
        number = (pair << 16).to(tl.float32, bitcast=True)
        offset = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        raw = _load(scale, row, at, WIDTH, GROUPS, EVEN, "")
        SUPERS: tl.constexpr = COLUMNS // _SUPER if _SUPER < COLUMNS else 1
        wide = _load(extra, row, column // _SUPER, C // _SUPER, SUPERS, EVEN, "")
        wide = spread(wide, ROWS, SUPERS, GROUPS)
        if SCALES == "super":
            number = raw.to(tl.float32) * wide
            offset = number
        else:
            nibbles = raw.to(tl.int32)
            number = (nibbles & 15).to(tl.float32) * _half(wide)
            offset = HALF * number - ((nibbles >> 4) & 15).to(tl.float32) * _half(wide >> 16)
    return number, offset


@triton.jit
def _half(bits):
    """fp32 of the fp16 in the low half of int32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _words(values, ROWS: tl.constexpr, WANTED: tl.constexpr):
    """fp32 [ROWS, groups] -> int32 [ROWS, WANTED] with the same bf16 in both halves."""
    both = tl.inline_asm_elementwise(_BOTH_BF16, "=r,r", [values], dtype=tl.int32, is_pure=True, pack=1)
    return spread(both, ROWS, values.shape[1], WANTED)


@triton.jit
def _assembled(
    low, high, factor, offset, hint,
    CODE: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    asm: tl.constexpr = _assembly(CODE, AFFINE)
    PER: tl.constexpr = codes_an_element(CODE)
    if is_e2m1(CODE):
        s = spread(factor, ROWS, factor.shape[1], COLUMNS // PER)
    else:
        FACTOR: tl.constexpr = _E4M3_FACTOR if CODE == "e4m3" else 1.0
        s = _words(factor * FACTOR, ROWS, COLUMNS // PER)
    s += hint
    planes = (low, high, s) if high_bits(CODE) > 0 else (low, s)
    # Triton's language has no starred expressions.
    inputs = planes + (_words(offset, ROWS, COLUMNS // PER),) if AFFINE else planes  # noqa: RUF005
    if PER == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            asm, _constraints(4, len(inputs)), inputs, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
        tile = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            asm, _constraints(8, len(inputs)), inputs, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
        even = tl.join(tl.join(a, e), tl.join(c, g))
        odd = tl.join(tl.join(b, f), tl.join(d, h))
        tile = tl.join(even, odd)
    return tile.reshape(ROWS, COLUMNS)


@triton.jit
def _plain(
    low, high, factor, offset,
    CODE: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    code = _fields(low, low_bits(CODE), ROWS, COLUMNS)
    if high_bits(CODE) > 0:
        code = code | (_fields(high, high_bits(CODE), ROWS, COLUMNS) << low_bits(CODE))
    if CODE == "e4m3":
        number = _float8(code)
    elif is_e2m1(CODE):
        number = _e2m1(code)
        if CODE == "nvfp4":
            factor = _float8(factor)
        else:
            bits = tl.where(factor == 0, 1 << 22, factor << 23)  # 2^-127 is a denormal number
            factor = bits.to(tl.float32, bitcast=True)
    elif CODE == "iq4_nl":
        number = _iq4_nl(code)
    else:
        number = code.to(tl.float32) - half_range(CODE)
    value = number * spread(factor, ROWS, factor.shape[1], COLUMNS)
    if is_affine(SCALES):
        value += spread(offset, ROWS, offset.shape[1], COLUMNS)
    return value


@triton.jit
def _fields(words, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The codes in the words [ROWS, n], in the order of the columns."""
    PER: tl.constexpr = 4 if BITS == 8 else 8
    column = tl.arange(0, PER)
    shift = column * BITS if BITS >= 4 else (column // 2 + column % 2 * 4) * BITS
    return ((words[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)).reshape(ROWS, COLUMNS)


@triton.jit
def _float8(code):
    """fp32 of E4M3 codes."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * _E4M3_FACTOR


@triton.jit
def _e2m1(code):
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _iq4_nl(code):
    value = tl.where(code == 0, -127, -104)
    for entry in tl.static_range(2, 16):
        value = tl.where(code == entry, _table(entry), value)
    return value.to(tl.float32)
