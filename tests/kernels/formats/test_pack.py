"""The forms that kernels read hold the numbers of those in the files."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.e2m1_words import from_words
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.ggml import GGML_TYPES, Ggml
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import pack, packed_format
from tests.kernels.formats.test_ggml import DEVICE, random_bytes, stored

PACKED = [
    type_ for type_ in sorted(GGML_TYPES) if not isinstance(packed_format(Ggml(type_)), (Ggml, type(None)))
]


def test_the_types_that_kernels_read():
    names = {type_.name for type_ in PACKED}
    expected = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4"
    assert names == set(expected.split())


# Relative to the largest number of 32. Factors and offsets in bf16 err by 2^-9 each, minima that are
# subtracted in another order by fp32's rounding, the rest not at all.
ROUNDED = {"Q4_1": 2**-8, "Q5_1": 2**-8, "Q4_K": 2**-8, "Q5_K": 2**-8, "Q2_K": 2**-20}


@pytest.mark.parametrize("type_", PACKED)
def test_packed_numbers_are_equal(type_):
    matrix = stored(type_, random_bytes(type_, rows=6, blocks=3).reshape(2, 3, -1))
    packed = pack(matrix)
    assert packed.format == packed_format(matrix.format)
    assert packed.shape == matrix.shape
    expected = matrix.dequantize().unflatten(-1, (-1, 32))
    error = (packed.dequantize().unflatten(-1, (-1, 32)) - expected).abs().amax(-1)
    limit = ROUNDED.get(type_.name, 0) * expected.abs().amax(-1)
    # E8M0's highest code is no number in both.
    assert ((error <= limit) | expected.isnan().any(-1)).all()


@pytest.mark.parametrize("type_", PACKED)
def test_packed_is_hardly_larger(type_):
    matrix = stored(type_, random_bytes(type_, rows=6, blocks=4))
    assert matrix.nbytes <= pack(matrix).nbytes <= 1.12 * matrix.nbytes


def test_others_stay_as_they_are():
    matrix = dense(torch.ones(2, 3))
    assert pack(matrix) is matrix
    rare = stored(Type.IQ2_XXS, random_bytes(Type.IQ2_XXS, rows=1, blocks=1))
    assert pack(rare) is rare
    assert packed_format(rare.format) is None


@pytest.mark.parametrize("format", [Nvfp4(), Mxfp4()], ids=lambda format: format.name)
def test_codes_in_words(format):
    """All pairs of codes at all places."""
    matrix = StoredMatrix.empty(format, (64, 64), DEVICE)
    for part in matrix.parts.values():
        if part.dtype == torch.uint8:
            part.random_(0, 255)
        else:
            part.fill_(0.75)
    if format == Nvfp4():
        # All that are not negative, the denormal ones and 0 among them; 127 is none.
        codes = torch.arange(4 * 64, device=DEVICE).remainder(127).to(torch.uint8)
        matrix.parts["scale"].copy_(codes.view(torch.float8_e4m3fn).view(64, 4))
    packed = pack(matrix)
    assert packed.format == packed_format(format)
    assert torch.equal(packed.dequantize(), matrix.dequantize())
    if format == Mxfp4():
        assert torch.equal(from_words(packed.parts["data"]), matrix.parts["data"])
    assert packed.nbytes == matrix.nbytes
    assert pack(packed) is packed
