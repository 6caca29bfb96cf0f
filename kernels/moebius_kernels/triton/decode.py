"""Tiles of weight matrices, read in their stored forms and expanded to bf16 in registers.

What a form needs is told by constants: CODE, how codes become numbers; SCALES, what they are multiplied by
inside the loop over the columns; GROUP, for how many columns a factor is. `layouts.py` has them for each form.
ASM: with the instructions of `decode_asm.py`, else in plain Triton, as its interpreter needs it.
"""

import triton
import triton.language as tl

from moebius_kernels.triton import decode_asm

_IN4, _OUT4 = "=h,=h,=h,=h", ",r"
_IN8 = f"{_IN4},{_IN4}"
_E2M1_E4M3 = tl.constexpr(decode_asm.e2m1_codes("e4m3"))
_E2M1_E8M0 = tl.constexpr(decode_asm.e2m1_codes("e8m0"))
_E4M3 = tl.constexpr(decode_asm.e4m3_codes())
_BYTES = tl.constexpr(decode_asm.byte_codes(affine=False))
_BYTES_AFFINE = tl.constexpr(decode_asm.byte_codes(affine=True))
_IQ4_NL = tl.constexpr(decode_asm.iq4_nl_codes())
_INT4 = tl.constexpr(decode_asm.int_codes(4, 0, affine=False))
_INT4_AFFINE = tl.constexpr(decode_asm.int_codes(4, 0, affine=True))
_INT2_AFFINE = tl.constexpr(decode_asm.int_codes(2, 0, affine=True))
_INT21 = tl.constexpr(decode_asm.int_codes(2, 1, affine=False))
_INT41 = tl.constexpr(decode_asm.int_codes(4, 1, affine=False))
_INT41_AFFINE = tl.constexpr(decode_asm.int_codes(4, 1, affine=True))
_INT42 = tl.constexpr(decode_asm.int_codes(4, 2, affine=False))
_BOTH_BF16 = tl.constexpr(decode_asm.BOTH_BF16)
_FOUR_1 = tl.constexpr(f"{_IN4},r")
_FOUR_2 = tl.constexpr(f"{_IN4},r,r")
_FOUR_3 = tl.constexpr(f"{_IN4},r,r,r")
_EIGHT_2 = tl.constexpr(f"{_IN8},r,r")
_EIGHT_3 = tl.constexpr(f"{_IN8},r,r,r")
_EIGHT_4 = tl.constexpr(f"{_IN8},r,r,r,r")
