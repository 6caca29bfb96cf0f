"""Routed experts and dense products in true sizes on a GPU, with the tilings that serve them."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels.activations import SILU
from moebius_kernels.router import Route
from moebius_kernels.triton.experts import routed_experts
from moebius_kernels.triton.linear import multiply_expanded
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.tuning import DenseProduct
from tests.bench import gpu_experts, gpu_linear
from tests.kernels.triton.matrices import FORMATS

# Between two products numbers are rounded to bf16.
LIMIT = 6e-3
CASES = [
    ("qwen3", "bf16"),
    ("qwen3", "nvfp4_words"),
    ("qwen3", "fp8_block"),
    ("qwen3", "int4_words"),
    ("qwen3", "q4_k"),
    ("qwen3.6", "nvfp4_words"),
    ("gemma", "nvfp4_words"),
    ("flash", "nvfp4_words"),
    ("gpt-oss", "mxfp4_words"),
]
COUNTS = (1, 8, 32, 128, 512, 8192)


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_each_tiling_computes_what_the_reference_does(shape, form):
    product = gpu_experts.product_of(shape, form)
    trials = gpu_experts.trials_of(product, 1)
    wrong = {}
    for tiling in {gpu_experts.chosen(product, tokens): 0 for tokens in COUNTS}:
        # The fewest tokens that fill some tiles.
        found = trials.error(min(256, 3 * tiling.gate_up.tokens), tiling)
        if not found < LIMIT:
            wrong[tiling] = found
    assert not wrong


@pytest.mark.parametrize("form", ["bf16", "mxfp4_words", "nvfp4_words", "int4_words", "q4_k"])
@pytest.mark.parametrize(("rows", "tokens"), [(64, 64), (64, 128), (128, 128)])
def test_tall_tiles_again_and_again(form, rows, tokens):
    """Products that are under way read registers: writing these too early makes errors that come and go."""
    trials = gpu_experts.trials_of(gpu_experts.product_of("qwen3", form), 1)
    tiling = ExpertTiling(Tiling(tokens, 64, 64, 4, 3), Tiling(tokens, rows, 64, rows // 16, 3))
    assert max(trials.error(256, tiling) for _ in range(5)) < LIMIT


@pytest.mark.parametrize(("shape", "form"), [("gpt-oss", "mxfp4_words"), ("gemma", "nvfp4_words")])
@pytest.mark.parametrize(
    "tile",
    [
        Tiling(8, 64, 256, 4, 3),
        Tiling(8, 16, 256, 2, 4, depth=2),
        Tiling(16, 64, 128, 4, 4),
        Tiling(16, 32, 128, 2, 4),
        Tiling(32, 128, 128, 8, 3),
        Tiling(32, 128, 128, 4, 3),
        Tiling(64, 64, 64, 4, 3, swap=False),
        Tiling(24, 64, 128, 4, 4, parts=3),
    ],
    ids=str,
)
def test_words_in_each_order_of_columns(shape, form, tile):
    """Which register has which column is Triton's business; neither width is one that tiles divide."""
    trials = gpu_experts.trials_of(gpu_experts.product_of(shape, form), 1)
    assert trials.error(100, ExpertTiling(tile, tile)) < LIMIT


@pytest.mark.parametrize(("rows", "columns"), [(5120, 2048), (2048, 4096), (128, 2048), (32, 2880)])
@pytest.mark.parametrize("form", ["bf16", "nvfp4_words", "fp8_block"])
def test_each_dense_tiling(form, rows, columns):
    product = DenseProduct(FORMATS[form], rows, columns)
    trials = gpu_linear.trials_of(product, 1)
    for tokens in (1, 8, 16, 32, 64, 100):
        tiling = gpu_linear.chosen(product, tokens)
        assert trials.error(tokens, tiling) < LIMIT, tiling
    assert trials.error(300, multiply_expanded) < LIMIT


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_65536_pairs_and_twice_as_many_are_those_of_the_batches_halves(tokens):
    trials = gpu_experts.trials_of(gpu_experts.product_of("qwen3", "nvfp4_words"), 1)
    [weights] = trials.weights
    x, route = trials.inputs(tokens)
    whole = routed_experts(x, route, weights, SILU)
    for half in (slice(0, tokens // 2), slice(tokens // 2, tokens)):
        part = routed_experts(x[half], Route(route.weights[half], route.experts[half]), weights, SILU)
        assert (whole[half].float() - part.float()).norm() < 4e-3 * part.float().norm()
