"""Experts that are expanded before they multiply, against the reference."""

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.registry import TokenRange
from moebius_kernels.router import topk_softmax
from tests.kernels.triton.matrices import FORMATS

pytest.importorskip("triton")
from moebius_kernels.triton.expanded_experts import BACKENDS, routed_experts
from tests.kernels.triton.hopper_world import DEVICE, reason, simulated

TOLERANCE = 8e-3
FORMS = ("q4_k", "int4", "int4_words", "fp8_block", "mxfp4")

pytestmark = pytest.mark.usefixtures("poisoned")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    return None if DEVICE.type == "cuda" else simulated(monkeypatch)


def experts(*gate_up, down):
    """Of each matrix the form and the rows, 256 columns: experts that are not where their numbers say."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    matrices = [random_matrix(FORMATS[form], (3, rows, 256), generator) for form, rows in (*gate_up, down)]
    return ExpertWeights(matrices[:-1], matrices[-1], slots=torch.tensor([2, 0, 1], device=DEVICE))


@pytest.mark.parametrize(
    "weights",
    [
        *({"gate_up": [(form, 512)], "down": (form, 256)} for form in FORMS),
        # As files in GGUF have them: apart, and down in another form.
        {"gate_up": [("q4_k", 256), ("q4_k", 256)], "down": ("q6_k", 256)},
    ],
    ids=[*FORMS, "gguf"],
)
def test_experts_are_those_of_their_slots(weights):
    weights = experts(*weights["gate_up"], down=weights["down"])
    x = draw(9, 256, seed=2).bfloat16()
    route = topk_softmax(draw(9, 3, seed=3), 2)
    y = routed_experts(x, route, weights)
    expected = reference(x.float(), route, weights, SILU)
    assert y.dtype == x.dtype
    assert (y.float() - expected).norm() <= TOLERANCE * expected.norm()


def test_what_is_admitted():
    [backend] = BACKENDS

    def told(form, last=8192, **sizes):
        return reason(backend, FORMATS[form], TokenRange(1, last), **sizes)

    assert told("q4_k") == "None"
    assert "4096 tokens" in told("q4_k", last=2048)
    assert "nothing to expand" in told("bf16")
    assert "multiple of 128" in told("fp8_block", hidden=320)
    assert "no multiple of 64" in told("q4_0", hidden=544)
    assert "too many" in told("q4_k", experts=256, hidden=7168, inner=2048)
