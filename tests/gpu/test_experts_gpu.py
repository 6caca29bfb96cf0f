"""Routed experts and dense products in true sizes on a GPU, with the tilings that serve them."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels.activations import SILU
from moebius_kernels.router import Route
from moebius_kernels.triton.dense_tiling import DenseShape, dense_tiling
from moebius_kernels.triton.expert_tiling import expert_tiling
from moebius_kernels.triton.experts import routed_experts, shape_of
from moebius_kernels.triton.gemm import layout_for
from moebius_kernels.triton.linear import multiply_expanded
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from tests.bench.gpu_experts import SHAPES, error, inputs, make
from tests.bench.gpu_linear import error as dense_error
from tests.bench.gpu_linear import tiled
from tests.kernels.triton.matrices import FORMATS, random_matrix

DEVICE = torch.device("cuda")
# Between two products numbers are rounded to bf16.
LIMIT = 6e-3
CASES = [
    ("qwen3", "bf16"),
    ("qwen3", "nvfp4_words"),
    ("qwen3", "fp8_block"),
    ("qwen3", "q4_k"),
    ("qwen3.6", "nvfp4_words"),
    ("gemma", "nvfp4_words"),
    ("flash", "nvfp4_words"),
    ("gpt-oss", "mxfp4_words"),
]
COUNTS = (1, 8, 32, 128, 512, 8192)


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_each_tiling_computes_what_the_reference_does(shape, form):
    size = SHAPES[shape]
    [weights] = make(FORMATS[form], size, 1)
    wrong = {}
    for tiling in {expert_tiling(tokens, shape_of(weights, size.top_k)): 0 for tokens in COUNTS}:
        # The fewest tokens that fill some tiles.
        found = error(weights, size, min(256, 3 * tiling.gate_up.tokens), tiling)
        if not found < LIMIT:
            wrong[tiling] = found
    assert not wrong


@pytest.mark.parametrize("form", ["bf16", "mxfp4_words", "nvfp4_words", "q4_k"])
@pytest.mark.parametrize(("rows", "tokens"), [(64, 64), (64, 128), (128, 128)])
def test_tall_tiles_again_and_again(form, rows, tokens):
    """Products that are under way read registers: writing these too early makes errors that come and go."""
    size = SHAPES["qwen3"]
    [weights] = make(FORMATS[form], size, 1)
    tiling = ExpertTiling(Tiling(tokens, 64, 64, 4, 3), Tiling(tokens, rows, 64, rows // 16, 3))
    assert max(error(weights, size, 256, tiling) for _ in range(5)) < LIMIT


@pytest.mark.parametrize(("rows", "columns"), [(5120, 2048), (2048, 4096), (128, 2048), (32, 2880)])
@pytest.mark.parametrize("form", ["bf16", "nvfp4_words", "fp8_block"])
def test_each_dense_tiling(form, rows, columns):
    block = random_matrix(FORMATS[form], (rows, columns), torch.Generator(DEVICE).manual_seed(0))
    for tokens in (1, 8, 16, 32, 64, 100):
        tiling = dense_tiling(tokens, DenseShape(layout_for(block).code, rows, columns))
        assert dense_error(block, tokens, tiled(tiling)) < LIMIT, tiling
    assert dense_error(block, 300, multiply_expanded) < LIMIT


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_65536_pairs_and_twice_as_many_are_those_of_the_batches_halves(tokens):
    size = SHAPES["qwen3"]
    [weights] = make(FORMATS["nvfp4_words"], size, 1)
    x, route = inputs(size, tokens)
    whole = routed_experts(x, route, weights, SILU)
    for half in (slice(0, tokens // 2), slice(tokens // 2, tokens)):
        part = routed_experts(x[half], Route(route.weights[half], route.experts[half]), weights, SILU)
        assert (whole[half].float() - part.float()).norm() < 4e-3 * part.float().norm()
