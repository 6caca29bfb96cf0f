"""Routers prove themselves: which experts are as good, which weights those have, and what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius_kernels.calls import named_arguments, shapes_of
from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Verdict
from moebius_kernels.registry import Backend, Query, TokenRange
from moebius_kernels.router import RANKINGS, Ranking, Route, sigmoid_topk
from moebius_worker.preflight.compare_routes import route_difference
from moebius_worker.preflight.gates import Trial, judge
from tests.worker.preflight import bad

TOKENS, EXPERTS, TOP_K = 512, 256, 8


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ranking(operation: str, logits: torch.Tensor, top_k: int, **options: Any) -> Ranking:
    return RANKINGS[operation](**named_arguments(operation, (logits, top_k), options))


def _wrong(result: object, ranking: Ranking) -> str | None:
    return route_difference(result, ranking.route(), ranking)[1]


def _judged(function: Callable[..., Route], logits: torch.Tensor, **options: Any) -> Verdict:
    """All gates, of a candidate for `sigmoid_topk`."""
    arguments = named_arguments("sigmoid_topk", (logits, TOP_K), options)
    rows = TokenRange(len(logits), len(logits))
    query = Query("sigmoid_topk", shapes_of("sigmoid_topk", arguments), rows, bad.Tiny.device)
    trial = Trial(query, arguments, REFERENCE.sigmoid_topk(logits, TOP_K, **options), {}, capture=True)
    backend = Backend("sigmoid_topk", "candidate", function, devices=("cpu",))
    return judge(backend, trial, bad.SimulatedCuda(), lambda gate: None, timed=False)


def exact(logits: torch.Tensor, top_k: int, *, bias: torch.Tensor | None, scale: float, **_: object) -> Route:
    """Sigmoids that are correctly rounded; of equals the first. Weights are renormalised, without groups."""
    scores = logits.double().sigmoid().float()
    ranks = scores if bias is None else scores + bias
    experts = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, experts)
    return Route(scale * weights / weights.sum(dim=-1, keepdim=True), experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("around", "seed"), [(None, 0), (0.0, 0), (8.0, 4), (30.0, 4), (30.0, 5), (1000.0, 0)]
)
def test_ranks_that_differ_by_their_rounding_may_be_chosen_either_way(
    around: float | None, dtype: torch.dtype, seed: int
) -> None:
    logits = 2 * _draw(8 * TOKENS, EXPERTS, seed=seed).to(dtype)
    bias = None if around is None else around + 0.1 * _draw(EXPERTS, seed=seed + 100)
    verdict = _judged(exact, logits, bias=bias)
    assert verdict.rejected is None, verdict.reason
    assert verdict.error is not None
    assert verdict.error < 1e-6


def test_scores_that_are_all_1_or_all_0_are_equal() -> None:
    """Where logits are not."""
    assert _judged(exact, 40 + _draw(TOKENS, EXPERTS)).rejected is None
    peaked = 400 * _draw(TOKENS, EXPERTS)
    first = peaked.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights = first.values[:, :TOP_K] / first.values[:, :TOP_K].sum(dim=-1, keepdim=True)
    ranking = _ranking("topk_softmax", peaked, TOP_K)
    by_logits = Route(weights, peaked.topk(TOP_K, dim=-1).indices)
    for route in (Route(weights, first.indices[:, :TOP_K]), by_logits):
        assert _wrong(route, ranking) is None


SCORES = torch.tensor([[3.0, 1.0, 1.0, 0.0], [0.0, 4.0, 2.0, 1.0]])
RANKING = _ranking("topk_softmax", SCORES, 2)
ROUTE = RANKING.route()


def _route(experts: list[list[int]], weights: torch.Tensor = ROUTE.weights) -> Route:
    return Route(weights, torch.tensor(experts, dtype=torch.int32))


@pytest.mark.parametrize(
    ("route", "wrong"),
    [
        (ROUTE, None),
        # A tie may be broken either way.
        (_route([[0, 1], [1, 2]]), None),
        (_route([[0, 2], [1, 2]]), None),
        (_route([[0, 3], [1, 2]]), "other experts than the best in 1 of 2 rows"),
        # The best come first, each with its own weight.
        (_route([[0, 1], [2, 1]], ROUTE.weights), "other experts than the best in 1 of 2 rows"),
        (_route([[0, 1], [2, 1]], ROUTE.weights.flip(-1)), "other experts than the best in 1 of 2 rows"),
        (_route([[0, 1], [1, 2]], ROUTE.weights.flip(-1)), "relative error"),
        (_route([[0, 0], [1, 2]]), "an expert twice"),
        (_route([[0, 4], [1, 2]]), "experts 0 to 4 of 4"),
        (_route([[0, -1], [1, 2]]), "experts -1 to 2 of 4"),
        (_route([[0, 1], [1, 2]], ROUTE.weights * 1.01), "relative error"),
        (_route([[0, 1], [1, 2]], ROUTE.weights[:, :1]), "shape [2, 1] instead of [2, 2]"),
        (_route([[0], [1]]), "instead of [2, 2]"),
        (torch.zeros(2, 2), "a Tensor instead of a route"),
    ],
)
def test_routes_are_the_same_if_their_experts_rank_alike(route: object, wrong: str | None) -> None:
    found = _wrong(route, RANKING)
    assert (found is None) if wrong is None else (found is not None and wrong in found)


@pytest.mark.parametrize("operation", ["topk_softmax", "softmax_topk", "sigmoid_topk"])
@pytest.mark.parametrize(("place", "worse"), [(TOP_K - 1, 1), (0, TOP_K), (3, 200)])
def test_an_expert_that_is_worse_is_wrong(operation: str, place: int, worse: int) -> None:
    options = {"bias": 30 + 0.1 * _draw(EXPERTS, seed=1)} if operation == "sigmoid_topk" else {}
    ranking = _ranking(operation, _draw(TOKENS, EXPERTS), TOP_K, **options)
    experts = ranking.route().experts
    others = ranking.ranks.argsort(dim=-1, descending=True)[:, TOP_K:]
    experts[7, place] = others[7, worse - 1]
    assert "in 1 of 512 rows" in str(_wrong(Route(ranking.weights(experts), experts), ranking))


# All are chosen by 5.5, and have other scores.
TIED = {"logits": torch.tensor([[0.0, 2.0, -2.0, 4.0]]), "top_k": 2}
BIAS = 5.5 - TIED["logits"][0].sigmoid()


def test_a_tied_expert_has_the_weight_of_its_own_score_among_those_chosen() -> None:
    ranking = _ranking("sigmoid_topk", **TIED, bias=BIAS, scale=2.5)
    expected = ranking.route()
    scores = TIED["logits"].sigmoid()
    for chosen in ([0, 1], [3, 2], [2, 1]):
        own = 2.5 * scores[:, chosen] / scores[:, chosen].sum()
        assert _wrong(Route(own, torch.tensor([chosen])), ranking) is None
        others = torch.tensor([[expert for expert in range(4) if expert not in chosen]])
        assert "relative error" in str(_wrong(Route(own, others), ranking))
    assert _wrong(expected, ranking) is None


# Of four groups of two; the second and third are equal, the last is the worst but for its best expert.
GROUPED = torch.tensor([[3.0, 2.0, 1.0, 0.5, 0.5, 1.0, 2.5, -9.0]])
GROUPS = {"groups": 4, "top_groups": 2}


@pytest.mark.parametrize(
    ("chosen", "right"),
    [
        ([0, 1, 2], True),
        ([0, 1, 5], True),
        # Of two groups where one of both could be kept, and of one that could not.
        ([0, 2, 5], False),
        ([0, 6, 1], False),
        # Not the best of the groups that were kept.
        ([0, 1, 3], False),
        ([0, 1, 4], False),
        ([0, 2, 3], False),
        ([2, 5, 3], False),
    ],
)
def test_groups_that_rank_alike_may_be_kept_either_way(chosen: list[int], right: bool) -> None:
    ranking = _ranking("sigmoid_topk", GROUPED, 3, **GROUPS)
    experts = torch.tensor([chosen])
    found = _wrong(Route(ranking.weights(experts), experts), ranking)
    assert found is None if right else found == "other experts than the best in 1 of 1 rows"


@pytest.mark.parametrize("operation", ["topk_softmax", "sigmoid_topk"])
def test_groups_are_not_forgotten(operation: str) -> None:
    logits = _draw(TOKENS, EXPERTS)
    ranking = _ranking(operation, logits, TOP_K, groups=8, top_groups=4)
    assert _wrong(ranking.route(), ranking) is None
    assert "other experts" in str(_wrong(_ranking(operation, logits, TOP_K).route(), ranking))


class DriftsInReplays:
    """Its replay names other experts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **named: Any) -> Route:
        self.calls += 1
        route = sigmoid_topk(*args, **named)
        # Compiled, captured, replayed, called again.
        if self.calls == 3:
            route.experts[:, 0] += 1
        return route


def test_a_replay_names_the_experts_of_a_plain_call() -> None:
    drifts = DriftsInReplays()
    verdict = _judged(drifts, _draw(64, EXPERTS).bfloat16())
    assert drifts.calls == 4
    assert verdict.rejected == "capture"
    assert "its replay differs from a plain call" in (verdict.reason or "")
