"""Gated activations against their formulas, written out number by number, and transformers."""

import math

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moebius_kernels.activations import GELU_TANH, SILU, ClampedSwiglu, gated

# Gates and ups beside each other, on both sides of gpt-oss's limits.
GATES = [0.0, 0.5, -2.0, 6.9, 7.1, 50.0, -7.1, -50.0]
UPS = [3.0, -4.0, 0.1, 7.1, -7.1, 50.0, -50.0, 1.0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped(gate, up):
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (up + 1) * gate * sigmoid(1.702 * gate)


FORMULAS = {
    "silu": (SILU, lambda gate, up: gate * sigmoid(gate) * up),
    "gelu": (GELU_TANH, lambda gate, up: gelu_tanh(gate) * up),
    "clamped": (ClampedSwiglu(), clamped),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_formula(name, dtype, tolerance):
    activation, formula = FORMULAS[name]
    gate_up = torch.tensor([GATES + UPS, UPS + GATES], dtype=dtype)
    y = gated(gate_up, activation)
    assert y.dtype == dtype
    expected = [[formula(gate, up) for gate, up in zip(*row.chunk(2), strict=True)] for row in gate_up]
    torch.testing.assert_close(y.double(), torch.tensor(expected).double(), atol=tolerance, rtol=tolerance)


def test_clamped_swiglu_equals_gpt_oss():
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=8, intermediate_size=8))
    gate, up = torch.tensor(GATES), torch.tensor(UPS)
    expected = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten())
    torch.testing.assert_close(gated(torch.cat((gate, up)), ClampedSwiglu()), expected)


def test_other_limits():
    y = gated(torch.tensor([5.0, 5.0]), ClampedSwiglu(limit=2.0, alpha=1.0))
    torch.testing.assert_close(y, torch.tensor([3.0 * 2.0 * sigmoid(2.0)]))
