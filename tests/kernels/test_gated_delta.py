"""The gated delta rule against a plain recurrence in fp64, and against transformers."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from moebius_kernels.attention_plan import Span
from moebius_kernels.gated_delta import gated_delta_rule
from moebius_kernels.state_plan import plan_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 24
SLOTS = 12


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs(tokens, *, forget=1.0, seed=0):
    """q, k, v, g, beta as a layer would give them; `forget`: how large -g is."""
    return (
        3 * draw(tokens, KEY_HEADS, KEY_DIM, seed=seed),
        3 * draw(tokens, KEY_HEADS, KEY_DIM, seed=seed + 1),
        draw(tokens, VALUE_HEADS, VALUE_DIM, seed=seed + 2),
        -forget * torch.nn.functional.softplus(draw(tokens, VALUE_HEADS, seed=seed + 3)),
        draw(tokens, VALUE_HEADS, seed=seed + 4).sigmoid(),
    )


def pool(seed=9):
    return draw(SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=seed)


def plan(lengths, slots):
    return plan_states([Span(0, length, ()) for length in lengths], slots, DEVICE)


def recurrence(q, k, v, g, beta, state):
    """One token and one head after another, in fp64."""
    q, k, v, g, beta, state = (part.double() for part in (q, k, v, g, beta, state.clone()))
    output = torch.empty_like(v)
    for token in range(len(v)):
        for head in range(VALUE_HEADS):
            key_head = head // (VALUE_HEADS // KEY_HEADS)
            query, key = q[token, key_head], k[token, key_head]
            query = query / (query @ query + 1e-6).sqrt() / KEY_DIM**0.5
            key = key / (key @ key + 1e-6).sqrt()
            decayed = state[head] * g[token, head].exp()
            delta = beta[token, head] * (v[token, head] - key @ decayed)
            state[head] = decayed + torch.outer(key, delta)
            output[token, head] = query @ state[head]
    return output, state


def check(lengths, slots, tolerance=1e-5, **options):
    tokens = inputs(sum(lengths), **options)
    before = pool()
    states = before.clone()
    got = gated_delta_rule(*tokens, states, plan(lengths, slots))
    first = 0
    for length, slot in zip(lengths, slots, strict=True):
        rows = slice(first, first + length)
        expected, state = recurrence(*(part[rows] for part in tokens), before[slot])
        torch.testing.assert_close(got[rows].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(states[slot].double(), state, atol=tolerance, rtol=tolerance)
        first += length
    untouched = sorted(set(range(SLOTS)) - set(slots))
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 128, 200])
def test_one_request(length):
    check([length], [3])


def test_mixed_batch():
    check([1, 5, 1, 1, 70, 2, 1], [7, 0, 11, 3, 5, 1, 2])


@pytest.mark.parametrize("forget", [0.0, 1e-3, 30.0, 1000.0])
def test_states_that_forget_slowly_and_at_once(forget):
    check([1, 130], [4, 8], forget=forget)


def test_a_decay_after_a_great_one_keeps_its_digits():
    """Sums that run through a great decay would swallow what the small ones after it say."""
    q, k, v, g, beta = inputs(40)
    g = g * 0.01
    g[3] = -1e5
    states = pool()
    got = gated_delta_rule(q, k, v, g, beta, states, plan([40], [0]))
    expected, _ = recurrence(q, k, v, g, beta, pool()[0])
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-5)


def test_beta_of_one_and_zero():
    q, k, v, g, beta = inputs(100)
    beta = (beta > 0.5).float()
    expected, state = recurrence(q, k, v, g, beta, pool()[2])
    states = pool()
    got = gated_delta_rule(q, k, v, g, beta, states, plan([100], [2]))
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[2].double(), state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pieces", [[1] * 20, [7, 1, 64, 1, 3], [65, 2, 9]])
def test_pieces_equal_the_whole(pieces):
    tokens = inputs(sum(pieces))
    whole, states = pool(), pool()
    expected = gated_delta_rule(*tokens, whole, plan([sum(pieces)], [6]))
    got, first = [], 0
    for length in pieces:
        rows = slice(first, first + length)
        got.append(gated_delta_rule(*(part[rows] for part in tokens), states, plan([length], [6])))
        first += length
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reference", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("length", [1, 9, 64, 150])
def test_transformers(reference, length):
    tokens = inputs(length)
    states = pool()
    # Older versions want a key head for each value head.
    q, k = (part.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for part in tokens[:2])
    expected, state = reference(
        *(part.unsqueeze(0) for part in (q, k, *tokens[2:])),
        initial_state=pool()[[5]],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = gated_delta_rule(*tokens, states, plan([length], [5]))
    torch.testing.assert_close(got, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[5], state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 100])
def test_bf16_is_computed_in_fp32(length):
    q, k, v, g, beta = inputs(length)
    halves = (q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16())
    states, wide = pool(), pool()
    got = gated_delta_rule(*halves, states, plan([length], [0]))
    expected = gated_delta_rule(*(part.float() for part in halves), wide, plan([length], [0]))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())
    assert torch.equal(states, wide)


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_fault_stays_in_its_request(part, fault):
    lengths, slots = [1, 1, 5, 70, 1], [3, 1, 0, 4, 2]
    tokens = inputs(sum(lengths))
    before = pool()
    # A slot of nobody.
    before[7] = float("nan")
    states = before.clone()
    expected = gated_delta_rule(*tokens, states, plan(lengths, slots))
    broken = [one.clone() for one in tokens]
    # The second request, a decode, and the third. A decay of +inf would be no decay.
    broken[part][1] = broken[part][2 + 3] = -fault if part == 3 else fault
    states_then = before.clone()
    got = gated_delta_rule(*broken, states_then, plan(lengths, slots))
    others = [0, *range(7, 78)]
    assert torch.equal(got[others], expected[others])
    assert torch.equal(states_then[[3, 4, 2]], states[[3, 4, 2]])
    # To forget everything (g of -inf) is no fault.
    if part != 3 or fault != float("inf"):
        assert not got[[1, 5]].isfinite().flatten(1).all(dim=1).any()


@pytest.mark.parametrize("length", [1, 4, 80])
def test_a_faulty_state_shows(length):
    states = pool()
    states[1, 2, 3, 4] = float("nan")
    got = gated_delta_rule(*inputs(length), states, plan([length], [1]))
    assert got[:, 2].isnan().any(dim=-1).all()
    assert got[:, [0, 1, 3, 4, 5]].isfinite().all()
