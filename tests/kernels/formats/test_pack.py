"""The forms that kernels read hold the numbers of those in the files."""

import math

import pytest
import torch

from moebius_kernels.formats import e2m1_words, int_words
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.ggml import GGML_TYPES, Ggml
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import pack, packed_format
from moebius_kernels.formats.words import from_words, to_words
from tests.kernels.formats.ggml_bytes import DEVICE, random_bytes, stored

PACKED = sorted(GGML_TYPES)


def test_kernels_read_all_types():
    assert not any(isinstance(packed_format(Ggml(type_)), Ggml) for type_ in PACKED)


# Bits of a number of types that are read as codes of 4 to 8 bits: an upper limit, and more than in the file.
BITS = {
    **{"TQ1_0": 4.13, "TQ2_0": 4.13, "Q1_0": 4.26},
    **{"IQ1_S": 5.38, "IQ1_M": 5.63, "IQ2_XXS": 8.5, "IQ2_XS": 9, "IQ2_S": 9, "IQ3_XXS": 6.38, "IQ3_S": 5.38},
}


# Relative to the largest number of 32. Factors and offsets in bf16 err by 2^-9 each, minima that are
# subtracted in another order by fp32's rounding, the rest not at all.
ROUNDED = {"Q4_1": 2**-8, "Q5_1": 2**-8, "Q4_K": 2**-8, "Q5_K": 2**-8, "Q2_K": 2**-20}
ROUNDED |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q4_0", "TQ1_0", "TQ2_0", "Q1_0"), 2**-8)


@pytest.mark.parametrize("type_", PACKED)
def test_packed_numbers_are_equal(type_):
    matrix = stored(type_, random_bytes(type_, rows=6, blocks=3).reshape(2, 3, -1))
    packed = pack(matrix)
    assert packed.format == packed_format(matrix.format)
    assert packed.shape == matrix.shape
    expected = matrix.dequantize().unflatten(-1, (-1, 32))
    error = (packed.dequantize().unflatten(-1, (-1, 32)) - expected).abs().amax(-1)
    limit = ROUNDED.get(type_.name, 0) * expected.abs().amax(-1)
    assert (error <= limit).all()


def numberless(numbers, scale):
    """Without those whose E8M0 factor is 2^10 or larger."""
    return numbers.masked_fill(scale >= 137, math.nan)


@pytest.mark.parametrize("type_", PACKED)
def test_packed_is_hardly_larger(type_):
    # Rows of factors in words are for whole columns of 256, or 512.
    matrix = stored(type_, random_bytes(type_, rows=6, blocks=16))
    most = BITS[type_.name] / 8 * math.prod(matrix.shape) if type_.name in BITS else 1.12 * matrix.nbytes
    assert matrix.nbytes <= pack(matrix).nbytes <= most


def test_others_stay_as_they_are():
    matrix = dense(torch.ones(2, 3))
    assert pack(matrix) is matrix


@pytest.mark.parametrize("columns", [64, 160, 176, 512])
@pytest.mark.parametrize("format", [Nvfp4(), Mxfp4()], ids=lambda format: format.name)
def test_codes_in_words(format, columns):
    """All codes at all places, and rows that do not fill the last word."""
    columns -= columns % format.column_block
    matrix = StoredMatrix.empty(format, (64, columns), DEVICE)
    for part in matrix.parts.values():
        if part.dtype == torch.uint8:
            part.random_(0, 255)
        else:
            part.fill_(0.75)
    scale = matrix.parts["scale"]
    expected = matrix.dequantize()
    if format == Nvfp4():
        # All that are not negative, the denormal ones and 0 among them; 127 is none.
        codes = torch.arange(scale.numel(), device=DEVICE).remainder(127).to(torch.uint8)
        scale.copy_(codes.view(torch.float8_e4m3fn).view_as(scale))
        expected = matrix.dequantize()
    else:
        expected = numberless(expected.unflatten(-1, (-1, 32)), scale[..., None]).flatten(-2)
    packed = pack(matrix)
    assert packed.format == packed_format(format)
    assert torch.equal(packed.dequantize().nan_to_num(-1), expected.nan_to_num(-1))
    data = from_words(packed.parts["data"], e2m1_words.MOVES)
    # Kernels multiply what is beyond the last column by 0, so it has to be a number.
    assert not data[..., columns // 2 :].any()
    assert not packed.parts["scale"][..., columns // format.column_block :].any()
    if format == Mxfp4():
        assert torch.equal(data[..., : columns // 2], matrix.parts["data"])
    assert packed.nbytes < (1.02 if columns == 512 else 1.4) * matrix.nbytes
    assert pack(packed) is packed


@pytest.mark.parametrize("columns", [32, 88, 160, 416, 512])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
def test_integers_in_words(group, zero_point, columns):
    """All codes at all places, and rows that fill neither the last word nor the last group."""
    matrix = StoredMatrix.empty(IntGroup(4, group, zero_point, torch.float16), (3, 64, columns), DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for part in matrix.parts.values():
        if part.dtype == torch.uint8:
            part.random_(0, 256, generator=generator)
        else:
            # Numbers of bf16, and so are products of a few bits each.
            part.copy_(torch.randint(1, 16, part.shape, generator=generator, device=DEVICE) / 64)
    if zero_point:
        matrix.parts["zero"].remainder_(16)
    packed = pack(matrix)
    assert packed.format == packed_format(matrix.format)
    assert torch.equal(packed.dequantize(), matrix.dequantize())
    data = from_words(packed.parts["data"], int_words.MOVES)
    assert torch.equal(data[..., : columns // 2], matrix.parts["data"])
    assert not data[..., columns // 2 :].any()
    items = matrix.parts["scale"].shape[-1] * (2 if packed.format.centred else 1)
    assert not packed.parts["scale"][..., items:].any()
    # Rows of codes are copied by 16 bytes, those of factors by words.
    assert packed.parts["data"].stride(-2) % 16 == 0
    assert packed.parts["scale"].stride(-2) % 2 == 0
    assert packed.nbytes < (1.07 if columns == 512 else 2.6) * matrix.nbytes
    assert pack(packed) is packed


def test_small_groups_of_integers_stay_as_they_are():
    for form in (IntGroup(4, 16, True, torch.float16), IntGroup(4, 96, False, torch.float16)):
        assert packed_format(form) == form


@pytest.mark.parametrize("moves", [e2m1_words.MOVES, int_words.MOVES], ids=["e2m1", "int"])
def test_where_codes_are_in_words(moves):
    """One code in a row of zeros, by the description of the form."""
    for column in range(32):
        data = torch.zeros(1, 16, dtype=torch.uint8)
        data[0, column // 2] = 0b1111 << 4 * (column % 2)
        [word] = to_words(data, moves).view(torch.int32).tolist()
        bits = sum(mask << shift for shift, mask in moves[column // 8]) << 16 * (column % 2)
        assert [one & 0xFFFFFFFF for one in word] == [
            bits if index == column % 8 // 2 else 0 for index in range(4)
        ]
