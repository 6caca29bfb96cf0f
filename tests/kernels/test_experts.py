"""Expert networks against a loop that is too plain to be wrong."""

import pytest
import torch
import torch.nn.functional as F

from moebius_kernels import experts
from moebius_kernels.activations import SILU, ClampedSwiglu, gated
from moebius_kernels.experts import ExpertWeights, routed_experts
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.e2m1_words import E2m1Words
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import pack
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.router import Route, topk_softmax

HIDDEN, INNER = 16, 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def naive_experts(x, route, gate_up, down, gate_up_bias=None, down_bias=None, activation=SILU):
    """One token and one expert at a time, in fp64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(route.weights[token].tolist(), route.experts[token].tolist(), strict=True):
            hidden = gate_up[expert].double() @ x[token].double()
            if gate_up_bias is not None:
                hidden = hidden + gate_up_bias[expert].double()
            output = down[expert].double() @ gated(hidden, activation)
            if down_bias is not None:
                output = output + down_bias[expert].double()
            y[token] += weight * output.cpu()
    return y


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make(num_experts):
    gate_up = draw(num_experts, 2 * INNER, HIDDEN) / HIDDEN**0.5
    return gate_up, draw(num_experts, HIDDEN, INNER, seed=1) / INNER**0.5


def weights(gate_up, down, **options):
    return ExpertWeights([dense(gate_up)], dense(down), **options)


def check(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (4, 2), (4, 4), (64, 3)])
def test_experts_equal_the_naive_loop(tokens, num_experts, top_k):
    gate_up, down = make(num_experts)
    x = draw(tokens, HIDDEN, seed=2)
    route = topk_softmax(draw(tokens, num_experts, seed=3), top_k)
    y = routed_experts(x, route, weights(gate_up, down))
    assert y.dtype == x.dtype
    check(y, naive_experts(x, route, gate_up, down))


def test_biases_and_another_activation():
    gate_up, down = make(8)
    biases = {"gate_up_bias": draw(8, 2 * INNER, seed=4), "down_bias": draw(8, HIDDEN, seed=5)}
    x = 5 * draw(20, HIDDEN, seed=2)
    route = topk_softmax(draw(20, 8, seed=3), 3)
    y = routed_experts(x, route, weights(gate_up, down, **biases), ClampedSwiglu())
    check(y, naive_experts(x, route, gate_up, down, **biases, activation=ClampedSwiglu()), tolerance=1e-4)


def test_gate_and_up_apart():
    gate_up, down = make(4)
    x = draw(9, HIDDEN, seed=2)
    route = topk_softmax(draw(9, 4, seed=3), 2)
    apart = ExpertWeights([dense(part) for part in gate_up.chunk(2, dim=1)], dense(down))
    check(routed_experts(x, route, apart), naive_experts(x, route, gate_up, down))


def test_experts_are_found_in_their_slots():
    gate_up, down = make(8)
    x = draw(9, HIDDEN, seed=2)
    used = torch.tensor([6, 1, 3], device=DEVICE)
    chosen = topk_softmax(draw(9, 3, seed=3), 2)
    route = Route(chosen.weights, used[chosen.experts])
    # Three slots hold what the route asks for; the other experts are nowhere.
    slots = torch.full((8,), -1, device=DEVICE)
    slots[used] = torch.tensor([2, 0, 1], device=DEVICE)
    held = [1, 3, 6]
    y = routed_experts(x, route, weights(gate_up[held], down[held], slots=slots))
    check(y, naive_experts(x, route, gate_up, down))


@pytest.mark.parametrize("in_slots", [False, True])
def test_an_expert_that_is_none_adds_nothing(in_slots):
    """A router's kernel gives -1 for a row of NaN, whose weights are NaN then."""
    gate_up, down = make(8)
    held = weights(gate_up, down, slots=torch.arange(8, device=DEVICE) if in_slots else None)
    x = draw(5, HIDDEN, seed=2)
    route = topk_softmax(draw(5, 8, seed=3), 2)
    present = torch.tensor([1, 0, 1, 0, 1], device=DEVICE)
    expected = naive_experts(x, Route(route.weights * present[:, None], route.experts), gate_up, down)
    route.experts[1], route.experts[3], route.weights[3] = -1, -1, float("nan")
    y = routed_experts(x, route, held)
    assert y[3].isnan().all()
    check(y[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    none = Route(route.weights, torch.full_like(route.experts, -1))
    assert not routed_experts(x, none, held)[:3].any()


def test_experts_without_tokens_are_not_read():
    gate_up, down = make(8)
    used = [2, 5]
    for expert in set(range(8)) - set(used):
        gate_up[expert] = down[expert] = float("nan")
    x = draw(9, HIDDEN, seed=2)
    route = Route(draw(9, 2, seed=3).abs(), torch.tensor([used] * 9, device=DEVICE))
    check(routed_experts(x, route, weights(gate_up, down)), naive_experts(x, route, gate_up, down))


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_on_one_expert(expert):
    gate_up, down = make(8)
    x = draw(33, HIDDEN, seed=2)
    route = Route(torch.ones(33, 1, device=DEVICE), torch.full((33, 1), expert, device=DEVICE))
    y = routed_experts(x, route, weights(gate_up, down))
    gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
    torch.testing.assert_close(y, F.linear(F.silu(gate) * up, down[expert]), atol=1e-5, rtol=1e-5)


def test_a_faulty_token_stays_alone():
    gate_up, down = make(4)
    x = draw(6, HIDDEN, seed=2)
    route = topk_softmax(draw(6, 4, seed=3), 2)
    expected = routed_experts(x, route, weights(gate_up, down))
    x[2] = float("nan")
    y = routed_experts(x, route, weights(gate_up, down))
    assert y.isnan().all(dim=-1).tolist() == [row == 2 for row in range(6)]
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(y[others], expected[others])


def test_bf16_experts_sum_in_fp32():
    gate_up, down = (part.bfloat16() for part in make(4))
    x = draw(12, HIDDEN, seed=2).bfloat16()
    route = topk_softmax(draw(12, 4, seed=3), 4)
    y = routed_experts(x, route, weights(gate_up, down))
    assert y.dtype == torch.bfloat16
    check(y, naive_experts(x, route, gate_up, down), tolerance=0.03)


@pytest.mark.parametrize("form", [Nvfp4(), E2m1Words(Nvfp4()), Fp8(16, 16)])
def test_experts_that_are_expanded_together_are_the_same(form, monkeypatch):
    """As on a GPU, a few at a time; those without tokens are not among them."""
    base = form.base if isinstance(form, E2m1Words) else form
    generator = torch.Generator(DEVICE).manual_seed(0)
    gate_up, down = (random_matrix(base, shape, generator) for shape in ((8, 64, 32), (8, 32, 32)))
    if base is not form:
        gate_up, down = pack(gate_up), pack(down)
    used = torch.tensor([1, 2, 4, 5, 7], device=DEVICE)
    chosen = topk_softmax(draw(9, 5, seed=3), 2)
    x, route = draw(9, 32, seed=2).bfloat16(), Route(chosen.weights, used[chosen.experts])
    monkeypatch.setattr(experts, "_EXPANDED_TOGETHER", {})
    apart = routed_experts(x, route, ExpertWeights([gate_up], down))
    taken, take = [], StoredMatrix.take
    monkeypatch.setattr(StoredMatrix, "take", lambda one, slots: (taken.append(slots), take(one, slots))[1])
    monkeypatch.setattr(experts, "_EXPANDED_TOGETHER", {DEVICE.type: 2 * 64 * 32})
    assert torch.equal(routed_experts(x, route, ExpertWeights([gate_up], down)), apart)
    assert taken == 2 * [[1, 2]] + 2 * [[4, 5]]
