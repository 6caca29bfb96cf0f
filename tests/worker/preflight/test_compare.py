"""What counts as the same result, and what does not."""

import math

import pytest
import torch

from moebius_kernels.calls import named_arguments, shapes_of
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.registry import Device, Query, TokenRange
from moebius_worker.preflight.compare import difference, limit_of

LIMIT = 1e-2
ROWS = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def _changed(row: int, factor: float) -> torch.Tensor:
    rows = ROWS.clone()
    rows[row] *= factor
    return rows


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        (ROWS, None),
        (ROWS * 1.005, None),
        (ROWS * 1.02, "relative error 2.0e-02, allowed 1e-02"),
        # One row of many, which the error of the whole hides.
        (_changed(17, 1.1), "in row 17, allowed 4e-02"),
        (_changed(17, 1.02), None),
        (_changed(0, math.nan), "32 of 8192 numbers are NaN"),
        (_changed(0, math.inf), "infinite numbers elsewhere"),
        (ROWS[:255], r"shape [255, 32] instead of [256, 32]"),
        (ROWS.bfloat16(), "torch.bfloat16 instead of torch.float32"),
        ((ROWS, ROWS), "2 tensors instead of 1"),
        (torch.zeros_like(ROWS), "relative error 1.0e+00"),
    ],
)
def test_errors_are_relative_of_the_whole_and_of_each_row(result: object, wrong: str | None) -> None:
    _, found = difference(result, ROWS, LIMIT)
    assert (found is None) if wrong is None else (found is not None and wrong in found)


def test_a_row_that_is_small_beside_the_others_may_be_off_by_what_those_may() -> None:
    rows = ROWS.clone()
    rows[5] = 1e-6
    noisy = rows.clone()
    noisy[5] = 2e-6
    assert difference(noisy, rows, LIMIT)[1] is None


def test_where_the_reference_is_zero_nothing_else_will_do() -> None:
    zeros = torch.zeros(4)
    assert difference(zeros, zeros, LIMIT) == (0.0, None)
    assert difference(zeros + 1e-9, zeros, LIMIT)[1] is not None


def test_what_the_reference_makes_nan_may_be_nan() -> None:
    expected = torch.tensor([1.0, math.nan, -math.inf])
    assert difference(expected.clone(), expected, LIMIT)[1] is None
    assert difference(torch.tensor([1.0, 0.0, -math.inf]), expected, LIMIT)[1] is not None
    assert difference(torch.tensor([1.0, math.nan, math.inf]), expected, LIMIT)[1] is not None


@pytest.mark.parametrize(
    ("dtype", "matrix", "limit"),
    [
        (torch.float32, dense(torch.zeros(4, 8)), 1e-3),
        (torch.bfloat16, dense(torch.zeros(4, 8, dtype=torch.bfloat16)), 1.5e-2),
        (torch.bfloat16, StoredMatrix.empty(Fp8(), (4, 8), torch.device("cpu")), 1.5e-2),
    ],
)
def test_the_limit_goes_by_the_activations_and_the_stored_forms(
    dtype: torch.dtype, matrix: StoredMatrix, limit: float
) -> None:
    arguments = named_arguments("linear", (torch.zeros(1, 8, dtype=dtype), (matrix,)), {})
    query = Query("linear", shapes_of("linear", arguments), TokenRange(1, 1), Device("cpu", "CPU"))
    assert limit_of(query) == limit
    assert limit_of(query, declared=True) == 2.5e-2
