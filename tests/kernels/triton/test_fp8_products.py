"""Products of rounded activations: kernels against the references that round them too."""

from types import SimpleNamespace

import pytest
import torch

from moebius_kernels import rounded_products
from moebius_kernels.activations import GELU_TANH, SILU, ClampedSwiglu
from moebius_kernels.calls import shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as exact_experts
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.formats.rounded_activations import round_activations
from moebius_kernels.linear import linear as exact_linear
from moebius_kernels.registry import Device, Query, TokenRange, refusal
from moebius_kernels.router import Route, topk_softmax

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

from moebius_kernels.triton import fp8_experts, fp8_gemm_hopper, fp8_linear, targets  # noqa: E402
from moebius_kernels.triton.expert_tiling import rules  # noqa: E402
from moebius_kernels.triton.fp8_activations import Rounded, rounded_activations  # noqa: E402
from moebius_kernels.triton.tiling import ExpertTiling, Tiling  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Sums in another order move few codes of what is between the products to their neighbours; sums of 14 bits,
# as tensor cores have them, more.
TOLERANCE = 2e-2 if torch.cuda.is_available() else 6e-3
BLOCKS, ROWS = Fp8(128, 128, rounds_activations=True), Fp8(rounds_activations=True)
H200 = Device("cuda", "NVIDIA H200", (9, 0))

pytestmark = pytest.mark.usefixtures("poisoned")


def generator(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), device=DEVICE)


def make(form, num_experts, hidden, inner):
    gate_up = random_matrix(form, (num_experts, 2 * inner, hidden), generator(1))
    down = random_matrix(form, (num_experts, hidden, inner), generator(2))
    # No factor like another: one that belongs elsewhere would show.
    for matrix in (gate_up, down):
        scale = matrix.parts["scale"]
        scale *= 1 + torch.rand(scale.shape, generator=generator(3), device=DEVICE)
    return ExpertWeights([gate_up], down)


def difference(y, expected):
    return float((y.float() - expected.float()).norm() / expected.float().norm())


def test_groups_are_rounded_as_the_recipe_says():
    x = draw(5, 384).bfloat16()
    # Zeros, a subnormal group, and one number that outweighs its neighbours.
    x[0, :128], x[1, 128:256], x[2, 7] = 0, 1e-39, 3e4
    rounded = rounded_activations(x)
    # Quotients of doubles, rounded to fp32, are those of fp32; PyTorch's own on CUDA are products by 1 / 448.
    largest = x.double().cpu().unflatten(1, (3, 128)).abs().amax(-1).clamp_min(2.0**-100)
    factors = (largest / 448).float().to(DEVICE)
    assert torch.equal(rounded.scale, factors)
    wide = rounded.codes.float() * rounded.scale.repeat_interleave(128, dim=1)
    assert torch.equal(wide, round_activations(x))
    # Half a step of three bits of mantissa; below the normal numbers, half a step of 2^-9.
    bound = (x.float().abs() / 16).maximum(factors.repeat_interleave(128, dim=1) * 2**-10)
    assert (wide - x.float()).abs().le(bound * 1.0001).all()
    # Each of the five tokens twice, in some order.
    order = torch.tensor([9, 0, 4, 7, 1, 2, 8, 3, 6, 5], dtype=torch.int32, device=DEVICE)
    pairs = rounded_activations(x, order)
    assert torch.equal(pairs.codes.float(), rounded.codes.float()[order.long() // 2])
    assert torch.equal(pairs.scale, rounded.scale[order.long() // 2])


TILINGS = [
    ExpertTiling(Tiling(16, 128, 128), Tiling(16, 256, 128)),
    ExpertTiling(Tiling(64, 128, 128), Tiling(64, 128, 128)),
    ExpertTiling(Tiling(32, 128, 128), Tiling(32, 64, 128)),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("form", [BLOCKS, ROWS], ids=["blocks", "rows"])
def test_experts(form, tiling):
    weights = make(form, 5, 384, 256)
    x = draw(45, 384, seed=4).bfloat16()
    route = topk_softmax(draw(45, 5, seed=5), 3)
    y = fp8_experts.tiled_experts(x, route, weights, SILU, tiling)
    assert y.dtype == x.dtype
    assert difference(y, rounded_products.routed_experts(x, route, weights)) < TOLERANCE
    # That activations are rounded shows, and no more than three roundings of 3 bits each.
    assert 0.03 < difference(y, exact_experts(x.float(), route, weights)) < 0.05


@pytest.mark.parametrize("activation", [GELU_TANH, ClampedSwiglu()], ids=str)
def test_activations_and_gate_and_up_apart(activation):
    matrices = [random_matrix(BLOCKS, (3, 128, 256), generator(seed)) for seed in (1, 2)]
    weights = ExpertWeights(matrices, random_matrix(BLOCKS, (3, 256, 128), generator(3)))
    x = 4 * draw(9, 256, seed=4).bfloat16()
    route = topk_softmax(draw(9, 3, seed=5), 2)
    y = fp8_experts.routed_experts(x, route, weights, activation)
    assert difference(y, rounded_products.routed_experts(x, route, weights, activation)) < TOLERANCE


def test_slots_and_pairs_that_do_not_exist():
    """Experts are elsewhere than their numbers say; of some pairs, and of one token, there is none."""
    weights = make(BLOCKS, 3, 128, 128)
    slots = torch.tensor([-1, 1, 2, -1, 0], device=DEVICE)
    x = draw(20, 128, seed=4).bfloat16()
    chosen = topk_softmax(draw(20, 3, seed=5), 2)
    held = torch.tensor([4, 1, 2], device=DEVICE)[chosen.experts]
    missing = draw(20, 2, seed=6) > 0.6
    missing[-1] = True
    y = fp8_experts.routed_experts(
        x,
        Route(chosen.weights, held.masked_fill(missing, -1)),
        ExpertWeights(weights.gate_up, weights.down, slots=slots),
    )
    expected = rounded_products.routed_experts(
        x, Route(chosen.weights.masked_fill(missing, 0), chosen.experts), weights
    )
    assert not y[-1].any()
    assert difference(y, expected) < TOLERANCE


def test_a_faulty_token_stays_alone_and_none_are_nothing():
    weights = make(BLOCKS, 4, 128, 128)
    x = draw(6, 128, seed=4).bfloat16()
    route = topk_softmax(draw(6, 4, seed=5), 2)
    expected = fp8_experts.routed_experts(x, route, weights)
    x[2, 5] = float("nan")
    y = fp8_experts.routed_experts(x, route, weights)
    assert y.isnan().any(dim=-1).tolist() == [row == 2 for row in range(6)]
    assert torch.equal(y[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])
    assert fp8_experts.routed_experts(x[:0], topk_softmax(draw(0, 4), 2), weights).shape == (0, 128)


def test_references_of_dense_layers_round_x_alone():
    blocks = [random_matrix(BLOCKS, (rows, 384), generator(rows)) for rows in (256, 200, 1)]
    x, bias = draw(2, 37, 384, seed=4).bfloat16(), draw(457, seed=5).bfloat16()
    y = rounded_products.linear(x, blocks, bias)
    wide = torch.cat([block.dequantize() for block in blocks])
    assert y.dtype == x.dtype
    assert difference(y, round_activations(x) @ wide.T + bias.float()) < 3e-3
    assert 0.01 < difference(y, exact_linear(x.float(), blocks, bias)) < 0.03


def query(operation, tokens, call):
    return Query(operation, shapes_of(operation, call), TokenRange(1, tokens), H200)


def linear_reason(block, tokens=512):
    call = {"x": torch.zeros(2, block.shape[-1], dtype=torch.bfloat16), "blocks": (block,), "bias": None}
    [backend] = fp8_linear.BACKENDS
    return str(refusal(backend, query("linear", tokens, call)))


def test_dense_layers_are_admitted_where_the_checkpoint_declares_it():
    def matrix(form, rows=256, columns=512):
        return random_matrix(form, (rows, columns), torch.Generator())

    assert linear_reason(matrix(BLOCKS)) == "None"
    for undeclared in (matrix(Fp8(128, 128)), matrix(Fp8()), dense(torch.zeros(256, 512).bfloat16())):
        assert "does not declare" in linear_reason(undeclared)
    assert "64 tokens" in linear_reason(matrix(BLOCKS), tokens=32)
    assert "blocks of 128x128" in linear_reason(matrix(ROWS))
    assert "does not take" in linear_reason(matrix(BLOCKS, columns=384))
    assert "does not take" in linear_reason(matrix(BLOCKS, rows=200))


def experts_reason(gate_up, down, **biases):
    call = {
        "x": torch.zeros(2, gate_up.shape[-1], dtype=torch.bfloat16),
        "route": topk_softmax(torch.zeros(2, 3), 2),
        "weights": ExpertWeights([gate_up], down, **biases),
        "activation": SILU,
    }
    [backend] = fp8_experts.BACKENDS
    return refusal(backend, query("routed_experts", 512, call))


def test_experts_are_admitted_where_the_checkpoint_declares_it():
    weights = make(BLOCKS, 3, 256, 128)
    assert experts_reason(weights.gate_up[0], weights.down) is None
    plain = make(Fp8(128, 128), 3, 256, 128)
    assert "does not declare" in str(experts_reason(plain.gate_up[0], plain.down))
    ragged = make(BLOCKS, 3, 256, 192)
    assert "multiple of 128" in str(experts_reason(ragged.gate_up[0], ragged.down))
    small = make(Fp8(64, 128, rounds_activations=True), 3, 256, 128)
    assert "neither" in str(experts_reason(small.gate_up[0], small.down))
    assert "biases" in str(experts_reason(weights.gate_up[0], weights.down, down_bias=torch.zeros(3, 256)))


@pytest.mark.parametrize("architecture", [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)], ids=str)
def test_gluons_product_is_for_hopper_alone(architecture, monkeypatch):
    """On others its instructions do not exist: it is neither compiled for them nor launched there."""
    meta = torch.device("meta")
    target = GPUTarget("cuda", 10 * architecture[0] + architecture[1], 32)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(targets, "driver", driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: architecture)
    blocks, rows = (StoredMatrix.empty(form, (2, 128, 128), meta) for form in (BLOCKS, ROWS))
    compiled = Rounded.empty(256, 128, meta)
    launched = SimpleNamespace(codes=SimpleNamespace(is_meta=False, is_cuda=True, device="cuda"))
    for x in (compiled, launched):
        assert fp8_gemm_hopper.serves(x, blocks, Tiling(128, 128, 128)) is (architecture == (9, 0))
        assert not fp8_gemm_hopper.serves(x, blocks, Tiling(64, 128, 128))
        assert not fp8_gemm_hopper.serves(x, rows, Tiling(128, 128, 128))


@pytest.mark.parametrize("tokens", [32, 512, 20_000])
def test_tiles_of_both_products_agree(tokens):
    tiling = rules(tokens, fp8_experts.shape_of(make(BLOCKS, 8, 128, 128), 2))
    assert tiling.gate_up.tokens == tiling.down.tokens
    assert (tiling.gate_up.rows, tiling.gate_up.columns, tiling.down.columns) == (128, 128, 128)
