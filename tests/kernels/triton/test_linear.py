"""Dense layers' kernels against the reference."""

import pytest
import torch

from moebius_kernels.formats.dense import Dense, dense
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.linear import linear as reference
from tests.kernels.triton.matrices import FORMATS

triton = pytest.importorskip("triton")
from moebius_kernels.triton.dense_tiling import by_library  # noqa: E402
from moebius_kernels.triton.expand import expanded  # noqa: E402
from moebius_kernels.triton.linear import linear, multiply_expanded, tiled_linear  # noqa: E402
from moebius_kernels.triton.tiling import Tiling  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Numbers and factors are rounded to bf16.
TOLERANCE = 6e-3
BF16 = Dense(torch.bfloat16)
pytestmark = pytest.mark.usefixtures("poisoned")


def generator(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), device=DEVICE)


def check(y, x, blocks, bias=None):
    wide = [dense(block.dequantize()) for block in blocks]
    expected = reference(x.float(), wide, None if bias is None else bias.float())
    assert y.shape == expected.shape
    assert y.dtype == x.dtype
    assert not y.isnan().any()
    assert (y.float() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_every_form(format):
    block = random_matrix(format, (40, 512), generator(1))
    x = draw(3, 512, seed=2).bfloat16()
    check(linear(x, [block]), x, [block])


@pytest.mark.parametrize("tokens", [1, 9, 30, 70, 130])
def test_numbers_of_tokens(tokens):
    block = random_matrix(BF16, (72, 136), generator(1))
    x = draw(tokens, 136, seed=2).bfloat16()
    bias = draw(72, seed=3).bfloat16()
    check(linear(x, [block], bias), x, [block], bias)


def test_blocks_of_several_forms():
    blocks = [random_matrix(FORMATS[name], (24, 256), generator(1)) for name in ("q4_k", "bf16", "nvfp4")]
    bias = draw(72, seed=3).bfloat16()
    x = draw(2, 3, 256, seed=2).bfloat16()
    check(linear(x, blocks, bias), x, blocks, bias)


def test_shares_of_the_columns():
    """More programs than there are steps: some have nothing to add."""
    block = random_matrix(BF16, (40, 200), generator(1))
    x = draw(5, 200, seed=2).bfloat16()
    y = torch.full((5, 64), float("nan"), device=DEVICE).bfloat16()
    tiled_linear(x, block, None, y[:, 8:48], Tiling(8, 32, 64, splits=5))
    check(y[:, 8:48], x, [block])
    assert y[:, :8].isnan().all()
    assert y[:, 48:].isnan().all()


@pytest.mark.parametrize("tokens", [3, 16, 17, 40])
def test_parts_of_a_tile(tokens):
    block = random_matrix(BF16, (40, 72), generator(1))
    x = draw(tokens, 72, seed=2).bfloat16()
    y = torch.full((tokens, 40), float("nan"), device=DEVICE).bfloat16()
    tiled_linear(x, block, None, y, Tiling(16, 32, 64, parts=2))
    check(y, x, [block])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_many_tokens_by_way_of_the_expanded_matrix(format):
    block = random_matrix(format, (40, 512), generator(1))
    x, bias = draw(5, 512, seed=2).bfloat16(), draw(40, seed=3).bfloat16()
    y = torch.full((5, 64), float("nan"), device=DEVICE).bfloat16()
    multiply_expanded(x, block, bias, y[:, 8:48])
    check(y[:, 8:48], x, [block], bias)
    assert y[:, :8].isnan().all()
    assert y[:, 48:].isnan().all()


def test_a_matrix_that_ends_within_a_tile_is_expanded_whole():
    block = random_matrix(FORMATS["nvfp4"], (37, 320), generator(1))
    torch.testing.assert_close(expanded(block).float(), block.dequantize().float(), rtol=2**-8, atol=0)


def test_which_products_are_the_librarys():
    quantised = FORMATS["nvfp4"]
    assert not by_library(128, quantised, (5120, 2048))
    assert by_library(129, quantised, (5120, 2048))
    assert not by_library(4096, quantised, (200_000, 2048)), "its expansion would be gigabytes"
    assert by_library(33, BF16, (200_000, 2048))
    assert not by_library(128, BF16, (128, 2048))
    block = random_matrix(quantised, (1024, 64), generator(1))
    x, bias = draw(130, 64, seed=2).bfloat16(), draw(2048, seed=3).bfloat16()
    check(linear(x, [block], bias[:1024]), x, [block], bias[:1024])
    check(linear(x, [block, block], bias), x, [block, block], bias)


def test_no_tokens():
    block = random_matrix(BF16, (40, 72), generator(1))
    assert linear(draw(0, 72).bfloat16(), [block]).shape == (0, 40)
