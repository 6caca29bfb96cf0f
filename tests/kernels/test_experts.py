"""Router, activation and expert networks against loops that are too plain to be wrong."""

import pytest
import torch
import torch.nn.functional as F

from moebius_kernels.experts import routed_experts
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.swiglu import swiglu

HIDDEN, INNER = 16, 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def naive_experts(x, route, gate_up, down):
    """One token and one expert at a time, in fp64."""
    x, gate_up, down = x.cpu(), gate_up.cpu(), down.cpu()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(route.weights[token].tolist(), route.experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            y[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return y


def make(num_experts, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    gate_up = torch.randn(num_experts, 2 * INNER, HIDDEN, generator=generator, device=DEVICE) / HIDDEN**0.5
    down = torch.randn(num_experts, HIDDEN, INNER, generator=generator, device=DEVICE) / INNER**0.5
    return gate_up, down, generator


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (4, 2), (4, 4), (64, 3)])
def test_experts_equal_the_naive_loop(tokens, num_experts, top_k):
    gate_up, down, generator = make(num_experts)
    x = torch.randn(tokens, HIDDEN, generator=generator, device=DEVICE)
    route = topk_softmax(torch.randn(tokens, num_experts, generator=generator, device=DEVICE), top_k)
    y = routed_experts(x, route, gate_up, down)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double().cpu(), naive_experts(x, route, gate_up, down), atol=1e-5, rtol=1e-5)


def test_experts_without_tokens_are_not_read():
    gate_up, down, generator = make(8)
    used = [2, 5]
    for expert in set(range(8)) - set(used):
        gate_up[expert] = down[expert] = float("nan")
    x = torch.randn(9, HIDDEN, generator=generator, device=DEVICE)
    route = Route(
        torch.rand(9, 2, generator=generator, device=DEVICE), torch.tensor([used] * 9, device=DEVICE)
    )
    y = routed_experts(x, route, gate_up, down)
    torch.testing.assert_close(y.double().cpu(), naive_experts(x, route, gate_up, down), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_all_tokens_on_one_expert(expert):
    gate_up, down, generator = make(8)
    x = torch.randn(33, HIDDEN, generator=generator, device=DEVICE)
    route = Route(torch.ones(33, 1, device=DEVICE), torch.full((33, 1), expert, device=DEVICE))
    y = routed_experts(x, route, gate_up, down)
    torch.testing.assert_close(
        y, F.linear(swiglu(F.linear(x, gate_up[expert])), down[expert]), atol=1e-5, rtol=1e-5
    )


def test_bf16_experts_sum_in_fp32():
    gate_up, down, generator = make(4)
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    x = torch.randn(12, HIDDEN, generator=generator, device=DEVICE).bfloat16()
    route = topk_softmax(torch.randn(12, 4, generator=generator, device=DEVICE), 4)
    y = routed_experts(x, route, gate_up, down)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double().cpu(), naive_experts(x, route, gate_up, down), atol=0.03, rtol=0.03)


def test_router_takes_softmax_over_all_experts_and_renormalises():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 5.0, 4.0]], dtype=torch.bfloat16)
    route = topk_softmax(logits, 2)
    assert route.experts.tolist() == [[1, 2], [2, 3]]
    assert route.weights.dtype == torch.float32
    first = 1 / (1 + torch.tensor(-1.0).exp())  # of logits that differ by 1
    torch.testing.assert_close(route.weights, torch.stack([first, 1 - first]).repeat(2, 1))


def test_swiglu_has_the_gate_first():
    gate, up = torch.tensor([[0.5, -2.0]]), torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(swiglu(torch.cat((gate, up), dim=-1)), gate * torch.sigmoid(gate) * up)
