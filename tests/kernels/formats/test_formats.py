"""Dequantisation of each form, element by element, against its definition in numpy."""

import numpy as np
import pytest
import torch

from moebius_kernels.formats.codes import decode_e2m1, decode_e8m0, pack_nibbles, spread, unpack_nibbles
from moebius_kernels.formats.format import Format, FormatError, StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from tests.kernels.formats.numbers import E2M1, e4m3, e8m0, nibbles

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def random_matrix(form: Format, shape: tuple[int, ...], seed: int = 0) -> StoredMatrix:
    """Every byte at random, but for NaN codes, and factors of all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    matrix = StoredMatrix.empty(form, shape, CPU)
    for part in matrix.parts.values():
        if part.dtype == torch.float32:
            exponent = torch.randint(-40, 40, part.shape, generator=generator)
            part.copy_(torch.randn(part.shape, generator=generator) * 2.0**exponent)
        elif part.dtype in (torch.float16, torch.bfloat16):
            part.copy_(torch.randn(part.shape, generator=generator) * 0.01)
        else:
            codes = torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator)
            if part.dtype == torch.float8_e4m3fn:
                codes[codes & 127 == 127] ^= 1
            part.view(torch.uint8).copy_(codes)
    return matrix


def raw(matrix: StoredMatrix, part: str) -> np.ndarray:
    """The bytes, or the numbers where numpy has them."""
    tensor = matrix.parts[part]
    if tensor.dtype in (torch.float8_e4m3fn, torch.uint8):
        return tensor.view(torch.uint8).numpy()
    return tensor.float().numpy()


def equal(matrix: StoredMatrix, expected: np.ndarray) -> None:
    parts = {name: part.to(DEVICE) for name, part in matrix.parts.items()}
    values = StoredMatrix(matrix.format, matrix.shape, parts).dequantize().cpu()
    assert values.dtype == torch.float32
    assert values.shape == matrix.shape
    np.testing.assert_array_equal(values.numpy(), expected.astype(np.float32))


def factors(scale: np.ndarray, shape: tuple[int, ...], rows_per: int, columns_per: int) -> np.ndarray:
    """scale[..., r // rows_per, c // columns_per] for each r, c."""
    rows, columns = np.arange(shape[-2]) // rows_per, np.arange(shape[-1]) // columns_per
    return scale[..., rows[:, None], columns[None, :]]


def test_e2m1_and_e8m0_have_their_values_for_every_code():
    np.testing.assert_array_equal(decode_e2m1(ALL_BYTES[:16]).numpy(), E2M1)
    assert torch.signbit(decode_e2m1(ALL_BYTES[8:9])).item()  # -0
    np.testing.assert_array_equal(decode_e8m0(ALL_BYTES).numpy(), e8m0(np.arange(256)).astype(np.float32))
    assert decode_e8m0(ALL_BYTES[:1]).item() == 2.0**-127
    assert decode_e8m0(ALL_BYTES[254:255]).item() == 2.0**127


def test_the_low_nibble_is_the_even_element_and_packing_undoes_unpacking():
    assert unpack_nibbles(torch.tensor([0x21, 0x43], dtype=torch.uint8)).tolist() == [1, 2, 3, 4]
    assert torch.equal(pack_nibbles(unpack_nibbles(ALL_BYTES)), ALL_BYTES)


def test_the_last_block_of_factors_may_be_ragged():
    assert spread(torch.tensor([1, 2, 3]), 2, 5).tolist() == [1, 1, 2, 2, 3]


def test_fp8_has_the_value_of_every_code():
    codes = ALL_BYTES.view(torch.float8_e4m3fn).reshape(16, 16)
    matrix = StoredMatrix(Fp8(), (16, 16), {"data": codes, "scale": torch.ones(16, 1)})
    equal(matrix, e4m3(np.arange(256)).reshape(16, 16))


@pytest.mark.parametrize(
    ("form", "rows_per", "columns_per"),
    [
        (Fp8(), 1, 10**6),
        (Fp8(128, 128), 128, 128),
        (Fp8(1, 128), 1, 128),
        (Fp8(64, 32), 64, 32),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("shape", [(200, 300), (128, 256), (1, 1), (2, 3, 5, 7), (0, 128)])
def test_fp8(form: Fp8, rows_per: int, columns_per: int, shape: tuple[int, ...]):
    matrix = random_matrix(form, shape)
    scale = factors(raw(matrix, "scale"), shape, rows_per, columns_per)
    equal(matrix, e4m3(raw(matrix, "data")) * scale)


@pytest.mark.parametrize("shape", [(3, 16), (5, 80), (2, 3, 4, 48), (0, 16)])
def test_nvfp4(shape: tuple[int, ...]):
    matrix = random_matrix(Nvfp4(), shape)
    exact = E2M1[nibbles(raw(matrix, "data"))] * factors(e4m3(raw(matrix, "scale")), shape, 1, 16)
    equal(matrix, exact * raw(matrix, "row_scale"))


def test_nvfp4_with_every_factor_down_to_the_denormal_ones():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    parts = {
        "data": torch.full((len(codes), 8), 0x97, dtype=torch.uint8),  # 6 and -0.5
        "scale": codes.view(torch.float8_e4m3fn)[:, None],
        "row_scale": torch.full((len(codes), 1), 2.0**-130),
    }
    values = StoredMatrix(Nvfp4(), (len(codes), 16), parts).dequantize().numpy()
    scale = e4m3(codes.numpy()).astype(np.float64) * 2.0**-130
    np.testing.assert_array_equal(values[:, 0], (6 * scale).astype(np.float32))
    np.testing.assert_array_equal(values[:, 1], (-0.5 * scale).astype(np.float32))


@pytest.mark.parametrize("shape", [(256, 32), (5, 96), (2, 3, 4, 64), (0, 32)])
def test_mxfp4(shape: tuple[int, ...]):
    matrix = random_matrix(Mxfp4(), shape)
    if shape == (256, 32):  # every power of two, NaN among them
        matrix.parts["scale"].copy_(ALL_BYTES[:, None])
    exact = E2M1[nibbles(raw(matrix, "data"))] * factors(e8m0(raw(matrix, "scale")), shape, 1, 32)
    with np.errstate(over="ignore"):
        equal(matrix, exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int_group(bits, group, zero_point, dtype):
    for shape in [(5, 256), (2, 3, 4, 40), (1, 2)]:  # also with a last group that is ragged
        matrix = random_matrix(IntGroup(bits, group, zero_point, dtype), shape)
        data = raw(matrix, "data")
        codes = (nibbles(data) if bits == 4 else data).astype(np.float32)
        per = group or shape[-1]
        zero = (
            factors(raw(matrix, "zero").astype(np.float32), shape, 1, per) if zero_point else 2 ** (bits - 1)
        )
        equal(matrix, (codes - zero) * factors(raw(matrix, "scale"), shape, 1, per))


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        (Nvfp4(), 24),
        (Mxfp4(), 48),
        (IntGroup(4, 32, False, torch.float16), 33),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_columns_that_a_form_cannot_store_are_refused(form: Format, columns: int):
    with pytest.raises(FormatError, match=f"{form.column_block} columns, not {columns}"):
        StoredMatrix.empty(form, (4, columns), CPU)


@pytest.mark.parametrize(
    ("form", "rows", "columns"),
    [
        (Fp8(), 3, 5),
        (Fp8(128, 128), 128, 256),
        (Nvfp4(), 3, 32),
        (Mxfp4(), 3, 64),
        (IntGroup(4, 32, True, torch.float16), 3, 64),
        (IntGroup(8, None, False, torch.float16), 3, 5),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_parts_have_the_values_of_the_whole(form: Format, rows: int, columns: int):
    matrix = random_matrix(form, (2, 384, 512))
    whole = matrix.dequantize()
    cut = matrix.narrow_rows(rows, 2 * rows).narrow_columns(columns, columns)
    equal(cut, whole[:, rows : 3 * rows, columns : 2 * columns].numpy())
    equal(matrix[1], whole[1].numpy())


def test_forms_are_equal_by_what_they_are_and_have_names():
    assert Fp8(128, 128) == Fp8(128, 128) != Fp8()
    assert len({IntGroup(4, 128, False, torch.float16), IntGroup(4, 128, False, torch.float16)}) == 1
    named = [Fp8(), Fp8(128, 128), Nvfp4(), Mxfp4(), IntGroup(4, 128, True, torch.float16)]
    assert [form.name for form in named] == ["fp8", "fp8 128x128", "nvfp4", "mxfp4", "int4 g128 asymmetric"]
