"""The experts' kernels against the reference, with outputs poisoned by what was in the memory before."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moebius_kernels.activations import GELU_TANH, SILU, ClampedSwiglu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.dense import Dense, dense
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.router import Route, topk_softmax
from tests.kernels.triton.matrices import FORMATS

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

from moebius_kernels.triton import experts as backend  # noqa: E402
from moebius_kernels.triton import gemm, targets  # noqa: E402
from moebius_kernels.triton.tiling import ExpertTiling, Tiling  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Numbers, factors and what is between the products are rounded to bf16.
TOLERANCE = 8e-3


pytestmark = pytest.mark.usefixtures("poisoned")


def generator(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), device=DEVICE)


def make(format, num_experts, hidden, inner, **options):
    gate_up = random_matrix(format, (num_experts, 2 * inner, hidden), generator(1))
    return ExpertWeights(
        [gate_up], random_matrix(format, (num_experts, hidden, inner), generator(2)), **options
    )


def wide(weights):
    """The same weights as fp32 numbers."""
    return ExpertWeights(
        [dense(matrix.dequantize()) for matrix in weights.gate_up],
        dense(weights.down.dequantize()),
        None if weights.gate_up_bias is None else weights.gate_up_bias.float(),
        None if weights.down_bias is None else weights.down_bias.float(),
        weights.slots,
    )


def check(y, x, route, weights, activation=SILU):
    assert y.dtype == x.dtype
    expected = reference(x.float(), route, wide(weights), activation)
    assert not y.isnan().any()
    assert (y.float() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_every_form(format):
    weights = make(format, 2, 256, 256)
    x = draw(3, 256, seed=3).bfloat16()
    route = topk_softmax(draw(3, 2, seed=4), 1)
    check(backend.routed_experts(x, route, weights), x, route, weights)


BF16 = Dense(torch.bfloat16)
TILINGS = [
    ExpertTiling(Tiling(8, 32, 64), Tiling(8, 32, 64, splits=3)),
    ExpertTiling(Tiling(16, 32, 128, swap=False), Tiling(16, 64, 32, swap=False)),
    ExpertTiling(Tiling(16, 32, 64, parts=2), Tiling(16, 32, 64, parts=2, registers=96)),
    ExpertTiling(Tiling(8, 16, 64, depth=4), Tiling(8, 16, 64, depth=4, prefetch=True)),
    ExpertTiling(Tiling(24, 32, 64, parts=3), Tiling(24, 32, 64, parts=3, splits=2)),
    ExpertTiling(Tiling(64, 32, 32), Tiling(64, 32, 32, splits=2, swap=False)),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_every_cut(tokens, tiling):
    weights = make(BF16, 5, 40, 72)
    x = draw(tokens, 40, seed=3).bfloat16()
    route = topk_softmax(draw(tokens, 5, seed=4), 4)
    check(backend.tiled_experts(x, route, weights, SILU, tiling), x, route, weights)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block", "int4", "int4_words", "q6_k"])
def test_ragged_columns(format):
    """Widths that no tile of columns divides, and fewer scales than a tile of rows has."""
    form = FORMATS[format]
    inner = 256 if form.column_block == 256 else 176
    weights = make(form, 3, 256, inner)
    x = draw(3, 256, seed=3).bfloat16()
    route = topk_softmax(draw(3, 3, seed=4), 2)
    tiling = ExpertTiling(Tiling(8, 64, 128), Tiling(8, 64, 128))
    check(backend.tiled_experts(x, route, weights, SILU, tiling), x, route, weights)


@pytest.mark.parametrize("format", ["nvfp4_words", "mxfp4_words", "int4_words", "q4_0", "q4_k"])
@pytest.mark.parametrize(
    ("tokens", "columns", "splits", "width", "parts"),
    [
        (8, 32, 1, 96, 1),
        (16, 32, 1, 96, 1),
        (8, 64, 3, 160, 1),
        (16, 64, 1, 160, 1),
        (16, 128, 1, 288, 1),
        (8, 256, 2, 288, 1),
        (16, 128, 1, 160, 2),
    ],
)
def test_words_in_both_orders(format, tokens, columns, splits, width, parts):
    """Products of single warps and of four; widths that tiles do not divide, nor 32, nor 256."""
    form = FORMATS[format]
    # Split columns are the inner ones: as many, or as few as is quick.
    inner = width if splits > 1 else 32
    weights = make(form, 2, width, inner + (64 if form.column_block == 32 else 48))
    x = draw(5, width, seed=3).bfloat16()
    route = topk_softmax(draw(5, 2, seed=4), 1)
    one = Tiling(tokens, 64, columns, parts=parts)
    tiling = ExpertTiling(one, replace(one, splits=splits))
    check(backend.tiled_experts(x, route, weights, SILU, tiling), x, route, weights)


@pytest.mark.parametrize(("architecture", "ordered"), [(80, False), (90, True), (103, True), (120, False)])
def test_what_is_compiled_ahead_has_the_order_that_is_launched(monkeypatch, architecture, ordered):
    target = GPUTarget("cuda", architecture, 32)
    absent = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(targets, "driver", absent)
    sizes = torch.empty(1, device="meta")
    assert gemm._in_order(Tiling(16, 64, 128), sizes) == ordered
    assert targets.overlapping(sizes)["OVERLAP"] == (architecture >= 90)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, ClampedSwiglu()], ids=str)
def test_activations_and_biases(activation):
    biases = {"gate_up_bias": draw(4, 128, seed=5).bfloat16(), "down_bias": draw(4, 72, seed=6).bfloat16()}
    weights = make(BF16, 4, 72, 64, **biases)
    x = 4 * draw(9, 72, seed=3).bfloat16()
    route = topk_softmax(draw(9, 4, seed=4), 2)
    check(backend.routed_experts(x, route, weights, activation), x, route, weights, activation)


def test_gate_and_up_apart():
    matrices = [random_matrix(BF16, (4, 40, 72), generator(seed)) for seed in (1, 2)]
    weights = ExpertWeights(matrices, random_matrix(BF16, (4, 72, 40), generator(3)))
    x = draw(5, 72, seed=3).bfloat16()
    route = topk_softmax(draw(5, 4, seed=4), 2)
    check(backend.routed_experts(x, route, weights), x, route, weights)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_slots_and_pairs_that_do_not_exist(tokens):
    """Experts are elsewhere than their numbers say; of some pairs, and of some tokens, there is none."""
    full = make(BF16, 6, 72, 40)
    held = [4, 1, 2]
    weights = ExpertWeights(
        [dense(full.gate_up[0].parts["data"][held])],
        dense(full.down.parts["data"][held]),
        slots=torch.full((6,), -1, device=DEVICE),
    )
    weights.slots[held] = torch.arange(3, device=DEVICE)
    x = draw(tokens, 72, seed=3).bfloat16()
    chosen = topk_softmax(draw(tokens, 3, seed=4), 2)
    experts = torch.tensor(held, device=DEVICE)[chosen.experts]
    missing = draw(tokens, 2, seed=5) > 0.6
    missing[-1] = tokens > 1
    y = backend.routed_experts(x, Route(chosen.weights, experts.masked_fill(missing, -1)), weights)
    check(y, x, Route(chosen.weights.masked_fill(missing, 0), experts), weights)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens"),
    [(1, 1, 1), (3, 3, 5), (24, 16, 1), (24, 16, 9), (1024, 2, 20), (130, 4, 33), (1024, 7, 19)],
)
def test_numbers_of_experts(num_experts, top_k, tokens):
    weights = make(BF16, num_experts, 32, 16)
    x = draw(tokens, 32, seed=3).bfloat16()
    route = topk_softmax(draw(tokens, num_experts, seed=4), top_k)
    check(backend.routed_experts(x, route, weights), x, route, weights)


@pytest.mark.parametrize("tokens", [6, 131])
def test_all_tokens_on_one_expert(tokens):
    weights = make(BF16, 8, 32, 16)
    for matrix in (weights.gate_up[0], weights.down):
        matrix.parts["data"][[0, 1, 2, 4, 5, 6, 7]] = float("nan")
    x = draw(tokens, 32, seed=3).bfloat16()
    route = Route(torch.ones(tokens, 1, device=DEVICE), torch.full((tokens, 1), 3, device=DEVICE))
    y = backend.routed_experts(x, route, weights)
    one = ExpertWeights(
        [dense(weights.gate_up[0].parts["data"][3:4])], dense(weights.down.parts["data"][3:4])
    )
    check(y, x, Route(route.weights, route.experts * 0), one)


@pytest.mark.parametrize("tokens", [20, 41, 131])
@pytest.mark.parametrize("parts", [2, 3])
def test_more_pairs_of_an_expert_than_the_parts_of_a_tile_take(tokens, parts):
    weights = make(BF16, 2, 32, 16)
    x = draw(tokens, 32, seed=3).bfloat16()
    route = Route(torch.ones(tokens, 1, device=DEVICE), torch.ones(tokens, 1, dtype=torch.int64).to(DEVICE))
    tile = Tiling(8 * parts, 32, 32, parts=parts)
    check(backend.tiled_experts(x, route, weights, SILU, ExpertTiling(tile, tile)), x, route, weights)


def test_no_tokens():
    weights = make(BF16, 2, 32, 16)
    x = draw(0, 32).bfloat16()
    y = backend.routed_experts(x, topk_softmax(draw(0, 2), 1), weights)
    assert y.shape == (0, 32)


def test_a_faulty_token_stays_alone():
    weights = make(BF16, 4, 72, 40)
    x = draw(6, 72, seed=2).bfloat16()
    route = topk_softmax(draw(6, 4, seed=3), 2)
    expected = backend.routed_experts(x, route, weights)
    x[2] = float("nan")
    y = backend.routed_experts(x, route, weights)
    assert y.isnan().all(dim=-1).tolist() == [row == 2 for row in range(6)]
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_a_token_without_experts_is_nan_if_its_weights_are(tokens):
    """Such is a row whose router gave nothing but NaN: it must not pass for one with no experts to add."""
    weights = make(BF16, 4, 72, 40)
    x = draw(tokens, 72, seed=2).bfloat16()
    route = topk_softmax(draw(tokens, 4, seed=3), 2)
    expected = backend.routed_experts(x, route, weights)
    route.experts[-1], route.weights[-1] = -1, float("nan")
    y = backend.routed_experts(x, route, weights)
    assert y[-1].isnan().all()
    assert torch.equal(y[:-1], expected[:-1])
