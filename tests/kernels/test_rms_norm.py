"""Norms against transformers."""

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
    l2norm,
)

from moebius_kernels.rms_norm import gated_rms_norm, l2_norm, rms_norm

EPS = 1e-3
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(y, norm, dtype, tolerance, *inputs):
    expected = norm(*inputs)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected.to(dtype), atol=tolerance, rtol=tolerance)


def with_weight(norm, dtype):
    norm.weight.data = draw(48, seed=1)
    return norm.to(dtype)


@DTYPES
def test_plain(dtype, tolerance):
    norm = with_weight(LlamaRMSNorm(48, eps=EPS), dtype)
    x = (3 * draw(5, 2, 48)).to(dtype)
    check(rms_norm(x, norm.weight, EPS), norm, dtype, tolerance, x)


@DTYPES
def test_weights_about_zero(dtype, tolerance):
    norm = with_weight(Qwen3NextRMSNorm(48, eps=EPS), dtype)
    x = (3 * draw(5, 2, 48)).to(dtype)
    check(rms_norm(x, norm.weight, EPS, offset=1.0), norm, dtype, tolerance, x)


@DTYPES
def test_without_weights(dtype, tolerance):
    x = (3 * draw(5, 2, 48)).to(dtype)
    check(rms_norm(x, None, EPS), Gemma4RMSNorm(48, EPS, with_scale=False), dtype, tolerance, x)


@DTYPES
def test_gated(dtype, tolerance):
    norm = with_weight(Qwen3NextRMSNormGated(48, eps=EPS), dtype)
    x, z = (3 * draw(5, 2, 48)).to(dtype), (3 * draw(5, 2, 48, seed=2)).to(dtype)
    check(gated_rms_norm(x, z, norm.weight, EPS), norm, dtype, tolerance, x, z)


def test_gated_by_a_sigmoid():
    x, z, weight = draw(5, 48), draw(5, 48, seed=2), draw(48, seed=1)
    expected = rms_norm(x, weight, EPS) / (1 + (-z).exp())
    torch.testing.assert_close(gated_rms_norm(x, z, weight, EPS, "sigmoid"), expected)


@DTYPES
def test_l2(dtype, tolerance):
    x = (3 * draw(5, 2, 48)).to(dtype)
    x[1] = 0
    x[2] *= 1e-3
    check(l2_norm(x), l2norm, dtype, tolerance, x.float())


def test_weights_are_added_in_fp32():
    """1 + w rounds w away in bf16, where it is small."""
    x, weight = torch.ones(1, 8), torch.full((8,), 2.0**-10, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, 0.0, offset=1.0), torch.full((1, 8), 1 + 2.0**-10))
