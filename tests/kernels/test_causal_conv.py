"""The causal convolution against sums, and against transformers."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from moebius_kernels.attention_plan import Span
from moebius_kernels.causal_conv import causal_conv1d
from moebius_kernels.state_plan import plan_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHANNELS, SLOTS = 10, 9


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plan(lengths, slots):
    return plan_states([Span(0, length, ()) for length in lengths], slots, DEVICE)


def naive(x, weight, bias, past, activation):
    """One output after another, in fp64. Returns the outputs and what becomes of the past [C, K - 1]."""
    taps = weight.shape[1]
    everything = torch.cat((past.T, x)).double()
    output = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for tap in range(taps):
            output[token] += weight[:, tap].double() * everything[token + tap]
    if bias is not None:
        output += bias.double()
    if activation == "silu":
        output = output * output.sigmoid()
    return output, everything[len(everything) - taps + 1 :].T


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mixed_batch(taps, activation, with_bias):
    lengths, slots = [1, 5, 1, 2, 40, 3, 1], [8, 0, 3, 7, 1, 2, 5]
    x, weight = draw(sum(lengths), CHANNELS), draw(CHANNELS, taps, seed=1)
    bias = draw(CHANNELS, seed=2) if with_bias else None
    before = draw(SLOTS, CHANNELS, taps - 1, seed=3)
    states = before.clone()
    got = causal_conv1d(x, weight, bias, states, plan(lengths, slots), activation)
    first = 0
    for length, slot in zip(lengths, slots, strict=True):
        rows = slice(first, first + length)
        expected, past = naive(x[rows], weight, bias, before[slot], activation)
        torch.testing.assert_close(got[rows].double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(states[slot].double(), past)
        first += length
    assert torch.equal(states[[4, 6]], before[[4, 6]])


@pytest.mark.parametrize("dilation", [2, 3])
def test_dilation_is_a_kernel_with_zeros_between_its_taps(dilation):
    lengths, slots = [1, 5, 40, 1], [8, 0, 1, 5]
    x, weight = draw(sum(lengths), CHANNELS), draw(CHANNELS, 4, seed=1)
    spread = torch.zeros(CHANNELS, 3 * dilation + 1, device=DEVICE)
    spread[:, ::dilation] = weight
    states = draw(SLOTS, CHANNELS, 3 * dilation, seed=3)
    states_of_spread = states.clone()
    for _ in range(2):
        got = causal_conv1d(x, weight, None, states, plan(lengths, slots), "silu", dilation=dilation)
        expected = causal_conv1d(x, spread, None, states_of_spread, plan(lengths, slots), "silu")
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(states, states_of_spread)


@pytest.mark.parametrize("pieces", [[1] * 9, [2, 1, 7, 1], [5, 6]])
def test_pieces_equal_transformers_whole(pieces):
    x, weight = draw(sum(pieces), CHANNELS), draw(CHANNELS, 4, seed=1)
    expected = causal_conv1d_fn(x.T.unsqueeze(0), weight, None, "silu")[0].T
    states = torch.zeros(SLOTS, CHANNELS, 3, device=DEVICE)
    got, first = [], 0
    for length in pieces:
        got.append(
            causal_conv1d(x[first : first + length], weight, None, states, plan([length], [4]), "silu")
        )
        first += length
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 1], [8, 1]])
def test_bf16_is_summed_in_fp32(lengths):
    x, weight = draw(sum(lengths), CHANNELS).bfloat16(), draw(CHANNELS, 4, seed=1).bfloat16()
    states = draw(SLOTS, CHANNELS, 3, seed=2).bfloat16()
    wide = states.float()
    got = causal_conv1d(x, weight, None, states, plan(lengths, [0, 1]), "silu")
    expected = causal_conv1d(x.float(), weight.float(), None, wide, plan(lengths, [0, 1]), "silu")
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())
    assert torch.equal(states.float(), wide)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_fault_stays_in_its_request(fault):
    lengths, slots = [1, 1, 5, 6, 1], [3, 1, 0, 4, 2]
    x, weight = draw(sum(lengths), CHANNELS), draw(CHANNELS, 4, seed=1)
    before = draw(SLOTS, CHANNELS, 3, seed=2)
    before[7] = float("nan")
    states, states_then = before.clone(), before.clone()
    expected = causal_conv1d(x, weight, None, states, plan(lengths, slots), "silu")
    broken = x.clone()
    broken[1] = broken[2 + 3] = fault
    got = causal_conv1d(broken, weight, None, states_then, plan(lengths, slots), "silu")
    clean = [0, *range(2, 5), *range(7, 14)]
    assert torch.equal(got[clean], expected[clean])
    assert torch.equal(states_then[[3, 4, 2]], states[[3, 4, 2]])
    assert not got[[1, 5]].equal(expected[[1, 5]])
    # It is gone when it has left the window.
    after = causal_conv1d(x[:4], weight, None, states_then, plan([4], [1]), None)
    assert not after[:3].isfinite().all()
    assert after[3].isfinite().all()


def test_inputs_are_kept_as_they_were_before_the_convolution():
    x = draw(6, CHANNELS)
    states = torch.zeros(1, CHANNELS, 3, device=DEVICE)
    causal_conv1d(x, draw(CHANNELS, 4, seed=1), None, states, plan([6], [0]), "silu")
    assert torch.equal(states[0], x[3:].T)
