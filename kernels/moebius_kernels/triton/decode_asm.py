"""PTX that turns packed codes into bf16 numbers two at a time, for `tl.inline_asm_elementwise`.

A fragment reads one word of codes of a matrix row, eight of 4 bits or less or four of 8 bits, and writes as
many bf16 numbers in the order of the columns. Only fma and integer operations: nothing newer than sm_80.
An integer code goes into the mantissa of 128, so that one subtraction, which is exact, makes it a number;
the factor and the offset of its group follow in one fused operation.
"""

_ONE = "0x3f803f80"
_MINUS_ZERO = "0x80008000"
_MAGIC = "0x43004300"  # 128; the low seven bits of the mantissa are units
_LUT_AND_OR, _LUT_AND_XOR = "0xEA", "0x6A"
# The sixteen numbers of IQ4_NL as signed bytes, little-endian.
_IQ4_NL = ("0xbfad9881", "0xf6eaddcf", "0x26190d01", "0x71594535")


def int_codes(low_bits: int, high_bits: int, affine: bool) -> str:
    """Codes of 2 to 6 bits in a low plane of 4 or 2 bits and perhaps a high one of 1 or 2, minus half the
    range, times the factor, plus the offset if `affine`.

    Inputs: the low plane's word, the high plane's if there is one, factor and offset as bf16x2. A low plane
    of 4 bits is in the order of the columns. In all others the even columns' bits come first, then, from the
    middle of the byte or the two bytes, those of the odd columns.
    """
    inputs = _Inputs(8)
    low = inputs.next()
    high = inputs.next() if high_bits else ""
    scale, offset = inputs.next(), inputs.next() if affine else _MINUS_ZERO
    centre = f"0x{(0xC300 + (1 << low_bits + high_bits - 1)) * 0x10001:08x}"
    lines = [".reg .b32 q, h, z, t, u, one, centre, magic, offset;"]
    lines += [f"mov.b32 one, {_ONE};", f"mov.b32 centre, {centre};", f"mov.b32 magic, {_MAGIC};"]
    lines += [f"mov.b32 offset, {offset};"]
    if low_bits == 4:
        lines += [f"mov.b32 q, {low};", "shr.u32 h, q, 4;"]
    else:
        lines += _spread("q", low, 2, 0)
    if high_bits:
        lines += _spread("z", high, high_bits, low_bits)
    for pair in range(4):
        if low_bits == 4:
            lines += [f"prmt.b32 t, q, h, 0x{pair | 4 + pair << 8:04x};"]
        else:
            lines += [f"shr.u32 t, q, {2 * pair};"]
        lines += [f"lop3.b32 t, t, {_both((1 << low_bits) - 1)}, magic, {_LUT_AND_OR};"]
        if high_bits:
            lines += [f"shr.u32 u, z, {high_bits * pair};"]
            lines += [f"lop3.b32 t, u, {_both((1 << high_bits) - 1 << low_bits)}, t, {_LUT_AND_OR};"]
        lines += ["fma.rn.bf16x2 t, t, one, centre;", f"fma.rn.bf16x2 t, t, {scale}, offset;", _out(pair)]
    return _block(lines)


def iq4_nl_codes() -> str:
    """Codes of 4 bits looked up in IQ4_NL's table, times the factor. Inputs: word, factor as bf16x2."""
    lines = [".reg .b32 q, s, a, b, t, u, n, one, magic, zero;", f"mov.b32 one, {_ONE};"]
    lines += [f"mov.b32 magic, {_MAGIC};", f"mov.b32 zero, {_MINUS_ZERO};"]
    lines += [f".reg .b32 t{i}; mov.b32 t{i}, {word};" for i, word in enumerate(_IQ4_NL)]
    for half in range(2):
        lines += ["mov.b32 q, $8;" if half == 0 else "shr.u32 q, $8, 16;"]
        lines += ["and.b32 s, q, 0x7777;", "prmt.b32 a, t0, t1, s;", "prmt.b32 b, t2, t3, s;"]
        # Each selector takes its byte from the upper table where the code's highest bit is set.
        lines += [
            "shr.u32 s, q, 1;",
            f"lop3.b32 s, s, 0x4444, 0x3210, {_LUT_AND_OR};",
            "prmt.b32 n, a, b, s;",
        ]
        for pair in range(2):
            lines += [f"prmt.b32 t, n, 0, 0x{0x4140 + pair * 0x0202:04x};"]
            lines += _signed_byte(_LUT_AND_OR, "0xc300c300")
            lines += ["fma.rn.bf16x2 t, t, $9, zero;", _out(2 * half + pair)]
    return _block(lines)


def byte_codes(affine: bool) -> str:
    """Four codes of 8 bits minus 128, times the factor, plus the offset if `affine`."""
    offset = "$6" if affine else _MINUS_ZERO
    lines = [".reg .b32 t, u, one, magic, offset;", f"mov.b32 one, {_ONE};", f"mov.b32 magic, {_MAGIC};"]
    lines += [f"mov.b32 offset, {offset};"]
    for pair in range(2):
        lines += [f"prmt.b32 t, $4, 0, 0x{0x4140 + pair * 0x0202:04x};"]
        lines += _signed_byte(_LUT_AND_XOR, "0xc380c380")
        lines += ["fma.rn.bf16x2 t, t, $5, offset;", _out(pair)]
    return _block(lines)


def e4m3_codes() -> str:
    """Four E4M3 codes times the factor, which makes up for the difference of the exponents' biases, 2^120."""
    lines = [".reg .b32 t, u, zero;", f"mov.b32 zero, {_MINUS_ZERO};"]
    for pair in range(2):
        lines += [f"prmt.b32 t, $4, 0, 0x{0x1404 + pair * 0x2020:04x};"]
        lines += ["shr.u32 u, t, 4;", "and.b32 u, u, 0x07f007f0;"]
        lines += [f"lop3.b32 t, t, 0x80008000, u, {_LUT_AND_OR};"]
        lines += ["fma.rn.bf16x2 t, t, $5, zero;", _out(pair)]
    return _block(lines)


def e2m1_codes(scale: str) -> str:
    """E2M1 codes, a nibble each, times a scale byte, "e4m3" (its sign is not read) or "e8m0", times 2^-8.

    The codes' bits, placed in a bf16, are 2^-126 of their values; the factor is 2^118 times the scale, so
    that nothing is ever denormal and each product exact. E8M0 scales above 2^9 become infinite.
    """
    lines = [".reg .b32 q, h, t, u, s, a, b, zero;", f"mov.b32 zero, {_MINUS_ZERO};"]
    if scale == "e4m3":
        # Multiplied by 2^4 and doubled into both halves at once, then by 2^127 and 2^111.
        lines += ["and.b32 s, $9, 0x7f;", "mul.lo.u32 s, s, 0x00100010;"]
        lines += ["mov.b32 a, 0x7f007f00;", "mov.b32 b, 0x77007700;"]
        lines += ["fma.rn.bf16x2 s, s, a, zero;", "fma.rn.bf16x2 s, s, b, zero;"]
    else:
        lines += ["min.u32 s, $9, 137;", "mad.lo.u32 s, s, 0x00800080, 0x3b003b00;"]
    lines += ["mov.b32 q, $8;", "shl.b32 h, q, 4;"]
    for pair in range(4):
        lines += [f"prmt.b32 t, h, q, 0x{pair * 0x1111 + 0x4400:04x};", "shr.u32 u, t, 6;"]
        lines += ["and.b32 u, u, 0x01c001c0;", f"lop3.b32 t, t, 0x80008000, u, {_LUT_AND_OR};"]
        lines += ["fma.rn.bf16x2 t, t, s, zero;", _out(pair)]
    return _block(lines)


def word_factors(scale: str, count: int) -> str:
    """From a word with the factors of 32 columns each, as `formats/e2m1_words.py` has them, `count` words for
    `e2m1_words`: two bf16 that are 2^118 times the factors, "e4m3" one of two bytes in each half, "e8m0" that
    of a byte in both."""
    lines = []
    for index in range(count):
        out = f"${index}"
        if scale == "e4m3":
            lines += [f"prmt.b32 {out}, ${count}, 0, 0x{0x4140 + index * 0x0202:04x};"]
            lines += [f"mad.lo.u32 {out}, {out}, 16, 0x73007300;"]
        else:
            lines += [f"prmt.b32 {out}, ${count}, 0, 0x{0x4440 + index:04x};"]
            lines += [f"mad.lo.u32 {out}, {out}, 0x00800080, 0x3b003b00;"]
    return _block(lines)


def e2m1_words() -> str:
    """As `e2m1_codes`, of a word in the order of `formats/e2m1_words.py` and factors of `word_factors`: the
    lower one is for the first two pairs, the other for the last two."""
    lines = [".reg .b32 q, t, u, v, first, last, zero;", ".reg .b16 a, b;", f"mov.b32 zero, {_MINUS_ZERO};"]
    # A multiplication can take one half twice.
    lines += ["mov.b32 {a, b}, $9;", "mov.b32 first, {a, a};", "mov.b32 last, {b, b};", "mov.b32 q, $8;"]
    for pair in range(4):
        if pair < 3:
            # A product is no integer unit's business.
            lines += [f"mul.lo.u32 t, q, {1 << 3 * pair};", "and.b32 t, t, 0x81c081c0;"]
        else:
            lines += ["mul.lo.u32 t, q, 2;", "and.b32 t, t, 0x80008000;", "shr.u32 u, q, 5;"]
            lines += [f"lop3.b32 t, u, 0x01000100, t, {_LUT_AND_OR};", "shr.u32 v, q, 4;"]
            lines += [f"lop3.b32 t, v, 0x00c000c0, t, {_LUT_AND_OR};"]
        lines += [f"fma.rn.bf16x2 t, t, {'first' if pair < 2 else 'last'}, zero;", _out(pair)]
    return _block(lines)


def halves() -> str:
    """The two bf16 of a word, each in the lower half of another; the upper one is the same."""
    return _block([".reg .b16 a, b;", "mov.b32 {a, b}, $2;", "mov.b32 $0, {a, a};", "mov.b32 $1, {b, b};"])


def int_words(affine: bool) -> str:
    """As `int_codes` with a low plane of 4 bits alone, of a word in the order of `formats/int_words.py`. The
    lower half of the other input is the factor, the upper one the offset if `affine`."""
    lines = [".reg .b32 t, one, centre, magic, factor, offset;", ".reg .b16 a, b;"]
    lines += [f"mov.b32 one, {_ONE};", "mov.b32 centre, 0xc308c308;", f"mov.b32 magic, {_MAGIC};"]
    # A multiplication can take one half twice.
    lines += ["mov.b32 {a, b}, $9;", "mov.b32 factor, {a, a};"]
    lines += ["mov.b32 offset, {b, b};" if affine else f"mov.b32 offset, {_MINUS_ZERO};"]
    for pair in range(4):
        lines += [f"shr.u32 t, $8, {4 * pair};", f"lop3.b32 t, t, 0x000f000f, magic, {_LUT_AND_OR};"]
        lines += ["fma.rn.bf16x2 t, t, one, centre;", "fma.rn.bf16x2 t, t, factor, offset;", _out(pair)]
    return _block(lines)


# fp32 to the same bf16 in both halves of a word.
BOTH_BF16 = "cvt.rn.bf16x2.f32 $0, $1, $1;"


class _Inputs:
    """Names of the operands that follow the outputs."""

    def __init__(self, outputs: int) -> None:
        self._number = outputs

    def next(self) -> str:
        name = f"${self._number}"
        self._number += 1
        return name


def _spread(target: str, plane: str, bits: int, place: int) -> list[str]:
    """The even columns' bits from `place` of the lower half on, the odd ones' from that of the upper one."""
    middle = 16 - 4 * bits
    lines = [f"shl.b32 u, {plane}, {middle};", f"or.b32 {target}, {plane}, u;"]
    return lines + ([f"shl.b32 {target}, {target}, {place};"] if place else [])


def _signed_byte(lut: str, subtrahend: str) -> list[str]:
    """A byte in each half of t, two's complement or (with xor) 128 more, as bf16.

    128 + its low seven bits, minus 128 or 256: which of them is seen by the highest bit, and exact.
    """
    return [
        f"lop3.b32 u, t, 0x00800080, {subtrahend}, {lut};",
        f"lop3.b32 t, t, 0x007f007f, magic, {_LUT_AND_OR};",
        "fma.rn.bf16x2 t, t, one, u;",
    ]


def _both(bits: int) -> str:
    return f"0x{bits * 0x10001:08x}"


def _out(pair: int) -> str:
    return f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, t;"


def _block(lines: list[str]) -> str:
    return "{\n" + "\n".join(lines) + "\n}"
