"""Experts that are expanded before they multiply, against the reference."""

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.calls import shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.registry import Device, Query, TokenRange, refusal
from moebius_kernels.router import topk_softmax
from tests.kernels.triton.matrices import FORMATS

triton = pytest.importorskip("triton")
from moebius_kernels.triton.expanded_experts import BACKENDS, routed_experts  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 8e-3
H200 = Device("cuda", "NVIDIA H200", (9, 0))

pytestmark = pytest.mark.usefixtures("poisoned")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


@pytest.mark.parametrize("form", ["q4_k", "int4", "nvfp4_words", "fp8_block", "mxfp4"])
def test_experts_are_those_of_their_slots(form):
    generator = torch.Generator(DEVICE).manual_seed(1)
    weights = ExpertWeights(
        [random_matrix(FORMATS[form], (3, 512, 256), generator)],
        random_matrix(FORMATS[form], (3, 256, 256), generator),
        slots=torch.tensor([2, 0, 1], device=DEVICE),
    )
    x = draw(9, 256, seed=2).bfloat16()
    route = topk_softmax(draw(9, 3, seed=3), 2)
    y = routed_experts(x, route, weights)
    expected = reference(x.float(), route, weights, SILU)
    assert y.dtype == x.dtype
    assert (y.float() - expected).norm() <= TOLERANCE * expected.norm()


def reason(form, *, tokens=8192, experts=4, hidden=512, inner=256):
    meta = torch.device("meta")
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    gate_up, down = (StoredMatrix.empty(FORMATS[form], shape, meta) for shape in shapes)
    call = {
        "x": torch.zeros(2, hidden, dtype=torch.bfloat16),
        "route": topk_softmax(torch.zeros(2, 3), 2),
        "weights": ExpertWeights([gate_up], down),
        "activation": SILU,
    }
    [backend] = BACKENDS
    query = Query("routed_experts", shapes_of("routed_experts", call), TokenRange(1, tokens), H200)
    return str(refusal(backend, query)), backend.workspace(query)


def test_what_is_admitted():
    found, workspace = reason("q4_k")
    assert found == "None"
    assert workspace == 2 * 4 * 3 * 512 * 256 + 2 * 8192 * 2 * (512 + 256)
    assert "4096 tokens" in reason("q4_k", tokens=2048)[0]
    assert "nothing to expand" in reason("bf16")[0]
    assert "multiple of 128" in reason("fp8_block", hidden=320)[0]
    assert "too many" in reason("q4_k", experts=256, hidden=7168, inner=2048)[0]
