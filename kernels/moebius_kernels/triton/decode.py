"""Tiles of weight matrices, read in their stored forms and expanded to bf16 in registers.

What a form needs is told by constants: CODE, how codes become numbers; SCALES, what multiplies them inside
the loop over the columns; GROUP, how many columns share a factor. `layouts.py` has them for each form.
ASM: with the instructions of `decode_asm.py`, else in plain Triton, as its interpreter needs it.
"""

import triton
import triton.language as tl

from moebius_kernels.triton import decode_asm

# Bits of a code: in its low plane, in its high one. Codes of 8 bits are read four a word, others eight.
_BITS = {
    "nvfp4": (4, 0),
    "mxfp4": (4, 0),
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


@triton.constexpr_function
def low_bits(code: str) -> int:
    return _BITS[code][0]


@triton.constexpr_function
def high_bits(code: str) -> int:
    return _BITS[code][1]


@triton.constexpr_function
def half_range(code: str) -> int:
    return 1 << sum(_BITS[code]) - 1


@triton.constexpr_function
def accumulator_factor(code: str, asm: bool) -> float:
    """What a product has to be multiplied by, because the tile was not."""
    return 256.0 if asm and code in ("nvfp4", "mxfp4") else 1.0


@triton.constexpr_function
def is_affine(scales: str) -> bool:
    return scales in ("zero", "pair", "super_pair", "super_nibble")


@triton.constexpr_function
def _assembly(code: str, affine: bool) -> str:
    match code:
        case "nvfp4":
            return decode_asm.e2m1_codes("e4m3")
        case "mxfp4":
            return decode_asm.e2m1_codes("e8m0")
        case "iq4_nl":
            return decode_asm.iq4_nl_codes()
        case "int8":
            return decode_asm.byte_codes(affine)
        case "e4m3":
            return decode_asm.e4m3_codes()
    return decode_asm.int_codes(*_BITS[code], affine)


@triton.constexpr_function
def _constraints(outputs: int, inputs: int) -> str:
    return ",".join(["=h"] * outputs + ["r"] * inputs)


@triton.jit
def load_tile(
    codes, high, scale, extra, row, block_row, column,
    C: tl.constexpr, EVEN: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """bf16 [ROWS, COLUMNS] of the matrix's rows `row` int64 [ROWS] from `column` on; 0 beyond column C.

    `block_row` int64 [ROWS]: the rows of the scales, where rows share them. EVEN: no tile goes beyond C.
    """
    if CODE == "bf16":
        at = column + tl.arange(0, COLUMNS)
        pointers = codes + (row * C)[:, None] + at[None, :]
        if EVEN:
            return tl.load(pointers, eviction_policy=POLICY)
        return tl.load(pointers, (at < C)[None, :], 0.0, eviction_policy=POLICY)
    PER: tl.constexpr = 4 if low_bits(CODE) == 8 else 8
    low = _load(codes, row, column // PER, C // PER, COLUMNS // PER, EVEN, POLICY)
    low = low.to(tl.int32)
    if low_bits(CODE) == 2:
        low = low & 0xFFFF
    if high_bits(CODE) > 0:
        upper = _load(high, row, column // PER, C // PER, COLUMNS // PER, EVEN, POLICY)
        upper = upper.to(tl.int32) & ((1 << 8 * high_bits(CODE)) - 1)
    else:
        upper = low
    factor, offset = _factors(scale, extra, row, block_row, column, C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS)
    if ASM:
        return _assembled(low, upper, factor, offset, CODE, is_affine(SCALES), ROWS, COLUMNS)
    return _plain(low, upper, factor, offset, CODE, SCALES, ROWS, COLUMNS)


@triton.jit
def _load(
    pointer, row, first, WIDTH: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr
):
    """Elements `first` to `first + COUNT` of the rows, of WIDTH elements each."""
    at = first + tl.arange(0, COUNT)
    pointers = pointer + (row * WIDTH)[:, None] + at[None, :]
    if EVEN:
        return tl.load(pointers, eviction_policy=POLICY)
    return tl.load(pointers, (at < WIDTH)[None, :], 0, eviction_policy=POLICY)


@triton.jit
def _factors(
    scale, extra, row, block_row, column,
    C: tl.constexpr, EVEN: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Factor and offset [ROWS, groups of the tile], fp32; for E2M1 codes the scale bytes, int32.

    value = (code - half its range) * factor + offset
    """
    if SCALES == "none":
        one = tl.full((ROWS, 1), 1.0, tl.float32)
        return one, one
    GROUPS: tl.constexpr = COLUMNS // GROUP if GROUP < COLUMNS and GROUP < C else 1
    WIDTH: tl.constexpr = (C + GROUP - 1) // GROUP
    if SCALES == "block":
        number = _load(scale, block_row, column // GROUP, WIDTH, GROUPS, EVEN, "")
        return number, number
    raw = _load(scale, row, column // GROUP, WIDTH, GROUPS, EVEN, "")
    if SCALES == "byte":
        byte = raw.to(tl.int32) & 255
        return byte, byte
    HALF: tl.constexpr = half_range(CODE)
    if SCALES == "number":
        number = raw.to(tl.float32)
        return number, number
    if SCALES == "zero":
        number = raw.to(tl.float32)
        zero = _load(extra, row, column // GROUP, WIDTH, GROUPS, EVEN, "").to(tl.float32)
        return number, (HALF - zero) * number
    if SCALES == "pair":
        number = _half(raw)
        return number, _half(raw >> 16) + HALF * number
    SUPERS: tl.constexpr = COLUMNS // _SUPER if _SUPER < COLUMNS else 1
    wide = _load(extra, row, column // _SUPER, C // _SUPER, SUPERS, EVEN, "")
    wide = _spread(wide, ROWS, SUPERS, GROUPS)
    if SCALES == "super":
        number = raw.to(tl.float32) * wide
        return number, number
    raw = raw.to(tl.int32)
    if SCALES == "super_pair":
        factor, minimum = raw & 255, (raw >> 8) & 255
    else:
        factor, minimum = raw & 15, (raw >> 4) & 15
    number = factor.to(tl.float32) * _half(wide)
    return number, HALF * number - minimum.to(tl.float32) * _half(wide >> 16)


@triton.jit
def _half(bits):
    """fp32 of the fp16 in the low half of int32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _spread(values, ROWS: tl.constexpr, HAS: tl.constexpr, WANTED: tl.constexpr):
    """[ROWS, HAS] -> [ROWS, WANTED], each value next to its copies."""
    if HAS == WANTED:
        return values
    return tl.broadcast_to(values[:, :, None], (ROWS, HAS, WANTED // HAS)).reshape(ROWS, WANTED)


@triton.jit
def _words(values, ROWS: tl.constexpr, WANTED: tl.constexpr, FACTOR: tl.constexpr):
    """fp32 [ROWS, groups] -> int32 [ROWS, WANTED] with the same bf16 in both halves."""
    both = tl.inline_asm_elementwise(
        decode_asm.BOTH_BF16, "=r,r", [values * FACTOR], dtype=tl.int32, is_pure=True, pack=1
    )
    return _spread(both, ROWS, values.shape[1], WANTED)


@triton.jit
def _assembled(
    low, high, factor, offset,
    CODE: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    asm: tl.constexpr = _assembly(CODE, AFFINE)
    if low_bits(CODE) == 8:
        FACTOR: tl.constexpr = _E4M3_FACTOR if CODE == "e4m3" else 1.0
        s = _words(factor, ROWS, COLUMNS // 4, FACTOR)
        if AFFINE:
            args = [low, s, _words(offset, ROWS, COLUMNS // 4, 1.0)]
        else:
            args = [low, s]
        a, b, c, d = tl.inline_asm_elementwise(
            asm, _constraints(4, len(args)), args, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
        return tl.join(tl.join(a, c), tl.join(b, d)).reshape(ROWS, COLUMNS)
    if CODE == "nvfp4" or CODE == "mxfp4":
        s = _spread(factor, ROWS, factor.shape[1], COLUMNS // 8)
    else:
        s = _words(factor, ROWS, COLUMNS // 8, 1.0)
    if AFFINE:
        o = _words(offset, ROWS, COLUMNS // 8, 1.0)
        args = [low, high, s, o] if high_bits(CODE) > 0 else [low, s, o]
    else:
        args = [low, high, s] if high_bits(CODE) > 0 else [low, s]
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        asm, _constraints(8, len(args)), args, dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
    )
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).reshape(ROWS, COLUMNS)


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
    elif CODE == "nvfp4" or CODE == "mxfp4":
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
    value = number * _spread(factor, ROWS, factor.shape[1], COLUMNS)
    if is_affine(SCALES):
        value += _spread(offset, ROWS, offset.shape[1], COLUMNS)
    return value.to(tl.bfloat16)


@triton.jit
def _fields(words, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The codes in the words [ROWS, n], in the order of the columns."""
    PER: tl.constexpr = 4 if BITS == 8 else 8
    column = tl.arange(0, PER)
    if BITS >= 4:
        shift = column * BITS
    else:
        shift = (column // 2 + column % 2 * 4) * BITS
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
        value = tl.where(code == entry, decode_table(entry), value)
    return value.to(tl.float32)


@triton.constexpr_function
def decode_table(entry: int) -> int:
    from moebius_kernels.formats.ggml_blocks import IQ4_NL

    return IQ4_NL[entry]
