"""FP8 products in true sizes on a GPU: all tilings, against the reference that rounds activations too."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels import rounded_products
from moebius_kernels.activations import SILU
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.router import topk_softmax
from moebius_kernels.triton import fp8_experts, fp8_linear
from tests.bench.gpu_fp8 import EXPERTS, FORM

# Of sums of 14 bits, and of codes between the products that these move to their neighbours.
PRODUCT_LIMIT, EXPERTS_LIMIT = 6e-3, 2e-2


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize("tiling", EXPERTS.values(), ids=EXPERTS.keys())
@pytest.mark.parametrize("tokens", [33, 700])
def test_experts(tokens, tiling):
    """Some experts have no token, others more than a tile."""
    weights = ExpertWeights(
        [random_matrix(FORM, (32, 1536, 2048), generator(1))],
        random_matrix(FORM, (32, 2048, 768), generator(2)),
    )
    x = torch.randn(tokens, 2048, generator=generator(3), device="cuda").bfloat16()
    logits = torch.randn(tokens, 32, generator=generator(4), device="cuda")
    logits[:, :4] += 2
    logits[:, 4] = -100
    route = topk_softmax(logits, 4)
    expected = rounded_products.routed_experts(x.float(), route, weights)
    for _ in range(5):
        y = fp8_experts.tiled_experts(x, route, weights, SILU, tiling)
        assert (y.float() - expected).norm() < EXPERTS_LIMIT * expected.norm()


@pytest.mark.parametrize("tokens", [1, 130, 1000])
def test_dense_layers(tokens):
    blocks = [random_matrix(FORM, (rows, 2048), generator(rows)) for rows in (2048, 384)]
    x = torch.randn(tokens, 2048, generator=generator(3), device="cuda").bfloat16()
    bias = torch.randn(2432, generator=generator(4), device="cuda").bfloat16()
    expected = rounded_products.linear(x.float(), blocks, bias)
    y = fp8_linear.linear(x, blocks, bias)
    assert (y.float() - expected).norm() < PRODUCT_LIMIT * expected.norm()
