"""Triton's gated delta rule and convolution against the references."""

import pytest
import torch

from moebius_kernels import causal_conv as reference_conv
from moebius_kernels import gated_delta as reference_delta
from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import plan_states_on_device
from moebius_kernels.state_plan import StatePlan
from moebius_kernels.triton.causal_conv import causal_conv1d
from moebius_kernels.triton.gated_delta import gated_delta_rule
from tests.kernels.paged_world import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned")

SLOTS = 9
MIXED = [1, 5, 1, 70, 2, 1]
MIXED_SLOTS = [7, 0, 3, 5, 8, 2]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plan_of(lengths, slots):
    return plan_states_on_device([Span(0, length, ()) for length in lengths], slots, DEVICE)


def delta_inputs(tokens, key_heads, heads, key_dim, value_dim, forget=1.0):
    """Slices of wider tensors, as a layer gives them."""
    wide = 3 * draw(tokens, 2 * key_heads * key_dim + heads * value_dim + 5)
    q, k, v, _ = wide.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim, 5], dim=1)
    g = -forget * torch.nn.functional.softplus(draw(tokens, heads, seed=3))
    parts = (q.unflatten(1, (key_heads, -1)), k.unflatten(1, (key_heads, -1)), v.unflatten(1, (heads, -1)))
    return *parts, g, draw(tokens, heads, seed=4).sigmoid()


def check_delta(lengths, slots, sizes=(1, 3, 16, 24), dtype=torch.float32, tolerance=2e-5, **options):
    inputs = delta_inputs(sum(lengths), *sizes, **options)
    inputs = *(part.to(dtype) for part in inputs[:3]), *inputs[3:]
    got_states = draw(SLOTS, sizes[1], sizes[2], sizes[3], seed=9)
    states, plan = got_states.clone(), plan_of(lengths, slots)
    got = gated_delta_rule(*inputs, got_states, plan)
    expected = reference_delta.gated_delta_rule(*inputs, states, plan)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got_states, states, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("forget", [0.0, 1.0, 1000.0])
def test_delta_rule_of_a_mixed_batch(forget):
    check_delta(MIXED, MIXED_SLOTS, forget=forget)


@pytest.mark.parametrize("sizes", [(2, 2, 16, 16), (1, 2, 20, 40), (1, 1, 128, 128)])
def test_delta_rule_of_other_sizes(sizes):
    check_delta([1, 65], [4, 1], sizes)


def test_delta_rule_in_half_precision():
    check_delta(MIXED, MIXED_SLOTS, dtype=torch.bfloat16, tolerance=0.06)


def test_a_decay_after_a_great_one_keeps_its_digits():
    q, k, v, g, beta = delta_inputs(40, 1, 1, 16, 16)
    g = g * 0.01
    g[3] = -1e5
    states, plan = draw(SLOTS, 1, 16, 16, seed=9), plan_of([40], [0])
    expected = reference_delta.gated_delta_rule(q, k, v, g, beta, states.clone(), plan)
    got = gated_delta_rule(q, k, v, g, beta, states, plan)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution(taps, dilation, bias):
    channels = 130
    x, weight = draw(sum(MIXED), channels + 7)[:, 3:-4], draw(channels, taps, seed=1)
    offset = draw(channels, seed=2) if bias else None
    got_states = draw(SLOTS, channels, (taps - 1) * dilation, seed=3)
    states, plan = got_states.clone(), plan_of(MIXED, MIXED_SLOTS)
    activation = "silu" if bias else None
    got = causal_conv1d(x, weight, offset, got_states, plan, activation, dilation)
    expected = reference_conv.causal_conv1d(x, weight, offset, states, plan, activation, dilation)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(got_states, states)


def test_padding_changes_no_state():
    rows = torch.arange(3, device=DEVICE)
    plan = StatePlan(rows, torch.tensor([4, -1, -1], device=DEVICE), ())
    inputs, states = delta_inputs(3, 1, 2, 16, 16), draw(SLOTS, 2, 16, 16)
    before = states.clone()
    got = gated_delta_rule(*inputs, states, plan)
    assert not got[1:].any()
    assert (states != before).flatten(1).any(1).nonzero().tolist() == [[4]]
    x, weight, kept = draw(3, 8), draw(8, 4), draw(SLOTS, 8, 3)
    before = kept.clone()
    assert not causal_conv1d(x, weight, None, kept, plan, "silu")[1:].any()
    assert (kept != before).flatten(1).any(1).nonzero().tolist() == [[4]]
