"""Experts by products that divide their labour, on a machine of threads and tensors, beside the reference."""

import pytest
import torch

from moebius_kernels import rounded_products
from moebius_kernels.activations import SILU, ClampedSwiglu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.int_words import ROW, IntWords
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.registry import TokenRange
from moebius_kernels.router import Route, topk_softmax

pytest.importorskip("triton")
from moebius_kernels.triton import bf16_gemm_hopper, fp8_experts
from moebius_kernels.triton.hopper_experts import BACKENDS, routed_experts
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from tests.kernels.triton.gluon_machine import Machine
from tests.kernels.triton.hopper_world import DEVICE, MXFP4, NVFP4, reason, simulated

# Between the products numbers are rounded to bf16.
LIMIT = 6e-3
# And, in FP8, codes are moved to their neighbours: by sums in another order, on a GPU by sums of 14 bits.
FP8_LIMIT = 2e-2 if DEVICE.type == "cuda" else LIMIT
INT4 = IntWords(128, centred=True)
BF16, FP8 = Dense(torch.bfloat16), Fp8(128, 128, rounds_activations=True)

on_the_machine = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU runs the kernel itself")
pytestmark = pytest.mark.usefixtures("poisoned")


def generator(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), device=DEVICE)


def make(form, experts, hidden, inner, apart=False):
    """`apart`: gate and up in a matrix each."""
    shapes = [(experts, inner, hidden)] * 2 if apart else [(experts, 2 * inner, hidden)]
    gate_up = [random_matrix(form, shape, generator(seed)) for seed, shape in enumerate(shapes)]
    return ExpertWeights(gate_up, random_matrix(form, (experts, hidden, inner), generator(9)))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    return None if DEVICE.type == "cuda" else simulated(monkeypatch)


def difference(y, expected):
    return float((y.float() - expected).norm() / expected.norm())


def test_bf16():
    """Tiles divide neither width; experts have more than a tile, less than half of one, and none."""
    weights = make(BF16, 4, 320, 192)
    x = draw(140, 320, seed=4).bfloat16()
    logits = draw(140, 4, seed=5) + torch.tensor([3.0, 0.0, -1.0, -100.0], device=DEVICE)
    route = topk_softmax(logits, 2)
    y = routed_experts(x, route, weights)
    assert y.dtype == x.dtype
    assert difference(y, reference(x.float(), route, weights)) < LIMIT


WORDS = {"nvfp4": NVFP4, "mxfp4": MXFP4} | {
    "int4 32": IntWords(32, centred=False),
    **{f"int4 {group} centred": IntWords(group, centred=True) for group in (32, 64, 128, 256, ROW)},
}


@pytest.mark.parametrize("form", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("hidden", [256, 320, 576])
def test_words(form, hidden):
    """A step has several groups, or a group several steps; the last of both may be ragged."""
    weights = make(form, 3, hidden, 192)
    x = draw(100, hidden, seed=4).bfloat16()
    route = topk_softmax(draw(100, 3, seed=5) + torch.tensor([3.0, 0.0, -1.0], device=DEVICE), 2)
    assert difference(routed_experts(x, route, weights), reference(x.float(), route, weights)) < LIMIT


@pytest.mark.parametrize("form", [BF16, MXFP4, INT4], ids=["bf16", "mxfp4", "int4"])
def test_biases_clamps_and_gate_and_up_apart(form):
    plain = make(form, 2, 192, 192, apart=True)
    biases = {"gate_up_bias": draw(2, 384, seed=6).bfloat16(), "down_bias": draw(2, 192, seed=7).bfloat16()}
    weights = ExpertWeights(plain.gate_up, plain.down, **biases)
    x = 4 * draw(40, 192, seed=4).bfloat16()
    route = topk_softmax(draw(40, 2, seed=5), 2)
    y = routed_experts(x, route, weights, ClampedSwiglu())
    assert difference(y, reference(x.float(), route, weights, ClampedSwiglu())) < LIMIT


@pytest.mark.parametrize("form", [BF16, NVFP4], ids=["bf16", "nvfp4"])
def test_slots_and_pairs_that_do_not_exist(form):
    """Experts are elsewhere than their numbers say; of some pairs, and of one token, there is none."""
    weights = make(form, 3, 192, 192)
    slots = torch.tensor([-1, 1, 2, -1, 0], device=DEVICE)
    x = draw(40, 192, seed=4).bfloat16()
    chosen = topk_softmax(draw(40, 3, seed=5), 2)
    missing = draw(40, 2, seed=6) > 0.6
    missing[-1] = True
    held = torch.tensor([4, 1, 2], device=DEVICE)[chosen.experts].masked_fill(missing, -1)
    y = routed_experts(
        x, Route(chosen.weights, held), ExpertWeights(weights.gate_up, weights.down, slots=slots)
    )
    expected = reference(x.float(), Route(chosen.weights.masked_fill(missing, 0), chosen.experts), weights)
    assert not y[-1].any()
    assert difference(y, expected) < LIMIT


@pytest.mark.parametrize("apart", [False, True])
def test_products_of_rounded_activations(apart):
    """By `fp8_gemm_hopper.py`, whose second factors of down rows are beyond the last here."""
    weights = make(FP8, 3, 384, 256, apart)
    for matrix in (*weights.gate_up, weights.down):
        scale = matrix.parts["scale"]
        scale.mul_(1 + torch.rand(scale.shape, generator=generator(3), device=DEVICE))
    x = draw(140, 384, seed=4).bfloat16()
    route = topk_softmax(draw(140, 3, seed=5) + torch.tensor([3.0, 0.0, -1.0], device=DEVICE), 2)
    tile = Tiling(128, 128, 128, stages=2)
    y = fp8_experts.tiled_experts(x, route, weights, SILU, ExpertTiling(tile, tile))
    assert difference(y, rounded_products.routed_experts(x, route, weights).float()) < FP8_LIMIT


def test_none_are_nothing():
    weights = make(BF16, 2, 192, 192)
    assert routed_experts(draw(0, 192).bfloat16(), topk_softmax(draw(0, 2), 2), weights).shape == (0, 192)


@on_the_machine
def test_the_machine_sees_a_stage_that_is_given_back_too_early(machine, monkeypatch):
    """Else it would prove little: here a group goes on with more products under way than it should."""
    weights = make(BF16, 1, 512, 64)
    x = draw(100, 512, seed=4).bfloat16()
    route = topk_softmax(draw(100, 1, seed=5), 1)
    late = {"warpgroup_mma_wait": lambda count, values: hasty.wait_for_products(4 * count, values)}
    hasty = Machine(replaced=late)
    monkeypatch.setattr(bf16_gemm_hopper, "launch", hasty.launch)
    y = routed_experts(x, route, weights)
    assert not difference(y, reference(x.float(), route, weights)) < LIMIT


def test_what_is_admitted():
    [backend] = BACKENDS

    def told(form, first=128, **sizes):
        return reason(backend, form, TokenRange(first, 8192), **sizes)

    assert told(BF16) == told(NVFP4) == told(MXFP4) == "None"
    assert told(INT4) == told(IntWords(32, centred=True)) == "None"
    assert "not nvfp4" in told(Nvfp4())
    assert "not int4 g16" in told(IntGroup(4, 16, False, torch.bfloat16))
    assert "no multiple of 64" in told(BF16, inner=160)
    # Two experts a token: so many pairs for each of four that tiles are half full.
    assert "128 tokens and more" in told(BF16, first=127)
    assert "4096 tokens and more" in told(NVFP4, first=2049, experts=128)
