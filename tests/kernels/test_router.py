"""Routers against transformers' and against loops."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MiniMaxM2Config, OlmoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

from moebius_kernels.router import sigmoid_topk, softmax_topk, topk_softmax

TOKENS, HIDDEN, EXPERTS, TOP_K = 33, 24, 32, 5


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(route, experts):
    """[T, E]: whatever the order of a token's experts."""
    return torch.zeros(len(route.weights), experts).scatter(1, route.experts, route.weights)


def check(route, reference, x):
    """`reference` is a router of transformers: x [T, H] -> logits, weights and experts."""
    with torch.no_grad():
        _, weights, experts = reference(x)
    expected = torch.zeros(len(x), EXPERTS).scatter(1, experts, weights)
    assert route.weights.dtype == torch.float32
    assert (route.weights.diff(dim=-1) <= 0).all() or route.weights.shape[1] == 1
    torch.testing.assert_close(dense(route, EXPERTS), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("renormalise", [False, True])
def test_topk_softmax_equals_olmoe(renormalise):
    config = OlmoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=renormalise
    )
    router = OlmoeTopKRouter(config)
    router.weight.data = draw(EXPERTS, HIDDEN)
    x = draw(TOKENS, HIDDEN, seed=1)
    check(topk_softmax(x @ router.weight.T, TOP_K, renormalise=renormalise), router, x)


@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (8, 3), (32, 6)])
def test_topk_softmax_of_the_best_groups_equals_deepseek_v2(groups, top_groups):
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=groups,
        topk_group=top_groups,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.5,
    )
    router = DeepseekV2TopkRouter(config)
    router.weight.data = draw(EXPERTS, HIDDEN)
    x = draw(TOKENS, HIDDEN, seed=1)
    logits = x @ router.weight.T
    kinds = {"groups": groups, "top_groups": top_groups, "renormalise": False, "scale": 2.5}
    check(topk_softmax(logits, TOP_K, **kinds), router, x)


def test_softmax_topk_equals_gpt_oss():
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    router = GptOssTopKRouter(config)
    router.weight.data, router.bias.data = draw(EXPERTS, HIDDEN), draw(EXPERTS, seed=2)
    x = draw(TOKENS, HIDDEN, seed=1)
    check(softmax_topk(x @ router.weight.T + router.bias, TOP_K), router, x)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 3), (8, 8), (16, 4), (32, 6)])
def test_sigmoid_topk_is_deepseeks_whatever_the_groups(groups, top_groups, renormalise):
    logits, bias = draw(TOKENS, EXPERTS), 0.3 * draw(EXPERTS, seed=2)
    route = sigmoid_topk(
        logits,
        TOP_K,
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=2.5,
    )
    expected = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    size = EXPERTS // groups
    for token in range(TOKENS):
        scores = [1 / (1 + (-logit).double().exp().item()) for logit in logits[token]]
        ranks = [score + shift for score, shift in zip(scores, bias.tolist(), strict=True)]
        goodness = [sum(sorted(ranks[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
        best_groups = sorted(range(groups), key=goodness.__getitem__)[-top_groups:]
        allowed = [expert for expert in range(EXPERTS) if expert // size in best_groups]
        chosen = sorted(allowed, key=ranks.__getitem__)[-TOP_K:]
        total = sum(scores[expert] for expert in chosen) if renormalise else 1.0
        for expert in chosen:
            expected[token, expert] = 2.5 * scores[expert] / total
    torch.testing.assert_close(dense(route, EXPERTS).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_sigmoid_topk_equals_deepseek_v3(groups, top_groups):
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=groups,
        topk_group=top_groups,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data, router.e_score_correction_bias.data = draw(EXPERTS, HIDDEN), draw(EXPERTS, seed=2)
    x = draw(TOKENS, HIDDEN, seed=1)
    with torch.no_grad():
        _, weights, experts = router(x)
    route = sigmoid_topk(
        x @ router.weight.T,
        TOP_K,
        bias=router.e_score_correction_bias,
        groups=groups,
        top_groups=top_groups,
        scale=2.5,
    )
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    torch.testing.assert_close(dense(route, EXPERTS), expected, atol=1e-6, rtol=1e-5)


def test_sigmoid_topk_equals_minimax_m2():
    config = MiniMaxM2Config(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    router = MiniMaxM2TopKRouter(config)
    router.weight.data, bias = draw(EXPERTS, HIDDEN), draw(EXPERTS, seed=2)
    x = draw(TOKENS, HIDDEN, seed=1)
    with torch.no_grad():
        _, weights, experts = router(x, bias)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    route = sigmoid_topk(x @ router.weight.T, TOP_K, bias=bias)
    torch.testing.assert_close(dense(route, EXPERTS), expected, atol=1e-6, rtol=1e-5)


def test_scores_of_zero_are_no_division_by_zero():
    route = sigmoid_topk(torch.full((1, 4), -1e4), 2)
    assert route.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("router", [topk_softmax, softmax_topk, sigmoid_topk])
def test_weights_are_found_in_fp32(router):
    logits = draw(TOKENS, EXPERTS).bfloat16()
    route, expected = router(logits, TOP_K), router(logits.float(), TOP_K)
    assert torch.equal(route.weights, expected.weights)
    assert torch.equal(route.experts, expected.experts)


@pytest.mark.parametrize("router", [topk_softmax, softmax_topk, sigmoid_topk])
def test_a_faulty_token_gets_experts_that_exist(router):
    logits = draw(4, 8)
    logits[1], logits[2, 3] = float("nan"), float("inf")
    route = router(logits, 3)
    assert ((route.experts >= 0) & (route.experts < 8)).all()
    assert torch.equal(route.weights[0], router(logits[:1], 3).weights[0])


def test_softmax_is_over_all_experts_and_the_best_come_first():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 5.0, 4.0]], dtype=torch.bfloat16)
    route = topk_softmax(logits, 2)
    assert route.experts.tolist() == [[1, 2], [2, 3]]
    first = 1 / (1 + torch.tensor(-1.0).exp())  # of logits that differ by 1
    torch.testing.assert_close(route.weights, torch.stack([first, 1 - first]).repeat(2, 1))
