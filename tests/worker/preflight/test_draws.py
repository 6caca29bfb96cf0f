"""The device draw proves itself like any other kernel: which tokens are as good, and which are wrong."""

import math
from dataclasses import replace

import pytest
import torch

from moebius_kernels.dispatch import bind
from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Plan, rows_of
from moebius_kernels.registry import Backend, Registry, references
from moebius_kernels.sampling import Drawn, Draws, draw_tokens, gumbel, scaled_logits
from moebius_worker.engine.drawing import draws_of
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.types import SampleRow, SamplingParams
from moebius_worker.preflight.compare_draws import draw_difference
from tests.worker.preflight.draw_world import CPU, MACHINE, RANGES, VOCAB, examine, logits_of


def _draws(*params: SamplingParams) -> Draws:
    return draws_of([SampleRow(one, (), range(row)) for row, one in enumerate(params)], CPU)


def good(logits: torch.Tensor, draws: Draws) -> Drawn:
    return draw_tokens(logits, draws)


def forgets_positions(logits: torch.Tensor, draws: Draws) -> Drawn:
    return draw_tokens(logits, replace(draws, positions=torch.zeros_like(draws.positions)))


def ignores_top_p(logits: torch.Tensor, draws: Draws) -> Drawn:
    return draw_tokens(logits, replace(draws, top_p=torch.ones_like(draws.top_p)))


def ignores_min_p(logits: torch.Tensor, draws: Draws) -> Drawn:
    return draw_tokens(logits, replace(draws, log_min_p=torch.full_like(draws.log_min_p, -math.inf)))


def always_random(logits: torch.Tensor, draws: Draws) -> Drawn:
    return draw_tokens(logits, replace(draws, temperature=draws.temperature.clamp_min(1.0)))


def next_token(logits: torch.Tensor, draws: Draws) -> Drawn:
    found = draw_tokens(logits, draws)
    return replace(found, token_ids=(found.token_ids + 1) % logits.shape[1])


def beyond_the_vocabulary(logits: torch.Tensor, draws: Draws) -> Drawn:
    found = draw_tokens(logits, draws)
    return replace(found, token_ids=found.token_ids + logits.shape[1])


def wrong_best(logits: torch.Tensor, draws: Draws) -> Drawn:
    found = draw_tokens(logits, draws)
    return replace(found, best=found.best * (1 + 1e-6))


def narrow_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
    found = draw_tokens(logits, draws)
    return replace(found, token_ids=found.token_ids.int())


def a_pair(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    found = draw_tokens(logits, draws)
    return found.token_ids, found.best


def last_row_missing(logits: torch.Tensor, draws: Draws) -> Drawn:
    found = draw_tokens(logits, draws)
    token_ids = torch.empty_like(found.token_ids)
    token_ids[:-1] = found.token_ids[:-1]
    return replace(found, token_ids=token_ids)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (forgets_positions, "instead of"),
        (ignores_top_p, "instead of"),
        (ignores_min_p, "instead of"),
        (always_random, "instead of"),
        (next_token, "other tokens in"),
        (beyond_the_vocabulary, f"of {VOCAB}"),
        (wrong_best, "largest logits: relative error"),
        (narrow_tokens, "torch.int32"),
        (a_pair, "a tuple instead of drawn tokens"),
        (last_row_missing, "tokens -1 to"),
    ],
)
def test_a_wrong_draw_is_rejected_with_a_reason_and_the_reference_draws(function, reason: str) -> None:
    plan = examine(function)
    rejected = [one for choice in plan.choices for one in choice.rejections]
    assert {one.rejected for one in rejected} == {"numbers"}
    assert any(reason in (one.reason or "") for one in rejected), rejected
    # Of the largest range, where there are all kinds of rows.
    last = [choice for choice in plan.choices if choice.tokens.last == 4]
    assert "reference" in {choice.backend for choice in last}
    assert any(row[0] == "draw_tokens" and "candidate:" in row[-1] for row in rows_of(plan))


def test_an_engine_whose_draw_was_rejected_draws_by_the_reference() -> None:
    plan = examine(next_token)
    operations = bind(plan, Registry((*references(), Backend("draw_tokens", "candidate", next_token)), {}))
    logits, rows = logits_of(4), [SampleRow(SamplingParams(seed=row, top_p=0.5), (), ()) for row in range(4)]
    assert sample(logits, rows, draw_tokens=operations.draw_tokens) == sample(logits, rows)


def test_a_right_draw_is_chosen_captured_and_found_again() -> None:
    plan = examine(good)
    assert not plan.rejections
    assert len(plan.choices) == 2 * len(RANGES)
    for choice in plan.choices:
        [verdict] = [one for one in choice.verdicts if one.backend == "candidate"]
        assert verdict.captured
        assert verdict.error == 0
    unplanned: list[tuple[str, str]] = []
    registry = Registry((*references(), Backend("draw_tokens", "candidate", good)), {})
    operations = bind(plan, registry, unplanned=lambda *call: unplanned.append(call))
    # Requests may ask for more candidates than were looked at.
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_k=5000)):
        operations.draw_tokens(logits_of(3), _draws(*[params] * 3))
    assert not unplanned


def test_a_draw_that_cannot_be_captured_does_not_take_the_graphs_from_steps() -> None:
    def waits(logits: torch.Tensor, draws: Draws) -> Drawn:
        if MACHINE.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return draw_tokens(logits, draws)

    plan = examine(waits)
    assert {gate for _, gate in plan.rejections} == {"capture"}
    uncaptured = Plan(tuple(replace(one, captured=False) for one in plan.choices))
    assert uncaptured.capturable(1)
    other = replace(uncaptured.choices[0], operation="linear")
    assert not Plan((*uncaptured.choices, other)).capturable(1)


def _verdict(logits: torch.Tensor, draws: Draws, token_ids: list[int]) -> str | None:
    expected = REFERENCE.draw_tokens(logits, draws)
    found = Drawn(torch.tensor(token_ids), expected.best)
    return draw_difference(found, expected, logits, draws)[1]


def test_of_two_sums_that_are_equal_but_for_rounding_either_will_do() -> None:
    draws = _draws(SamplingParams(seed=3))
    noise = gumbel(draws, VOCAB)[0]
    best, second = noise.topk(2).indices.tolist()
    logits = torch.zeros(1, VOCAB)
    for change, right in ((0.0, True), (1e-3, False)):
        # The second's sum is less by the rounding of fp32, and by `change`.
        logits[0, second] = (noise[best] - noise[second]).float() - change
        assert draw_tokens(logits, draws).token_ids.item() in (best, second)
        sums = scaled_logits(logits, draws) + gumbel(draws, VOCAB)
        assert abs(float(sums[0, best] - sums[0, second])) == pytest.approx(change, abs=1e-6)
        verdicts = [_verdict(logits, draws, [token]) for token in (best, second)]
        assert verdicts.count(None) == (2 if right else 1)


def test_what_top_p_keeps_at_its_edge_either_way_will_do() -> None:
    """Four tokens hold a quarter of the mass each but for their order; half of it is two tokens, or three."""
    logits = torch.full((1, VOCAB), -40.0)
    logits[0, :4] = torch.tensor([3e-7, 2e-7, 1e-7, 0.0])
    for seed in range(50):
        for top_p, most in ((0.5, 3), (0.5001, 3), (0.4999, 2), (0.7, 3)):
            draws = _draws(SamplingParams(seed=seed, top_p=top_p))
            noise = gumbel(draws, VOCAB)[0]
            wide, narrow = (int(noise[:kept].argmax()) for kept in (most, 2 if top_p == 0.5 else most))
            assert _verdict(logits, draws, [wide]) is None
            assert _verdict(logits, draws, [narrow]) is None
            if not math.isclose(float(noise[:4].max()), float(noise[wide])):
                assert _verdict(logits, draws, [int(noise[:4].argmax())]) is not None


def test_the_most_probable_token_is_the_first_of_equals_and_nothing_else() -> None:
    logits = torch.zeros(1, VOCAB)
    draws = _draws(SamplingParams(temperature=0.0))
    assert _verdict(logits, draws, [0]) is None
    assert _verdict(logits, draws, [1]) is not None


def test_what_is_barred_is_wrong_and_rows_that_are_not_finite_are_told_by_their_best() -> None:
    logits = logits_of(2)
    logits[0, 5], logits[1, 7] = -math.inf, math.nan
    draws = _draws(SamplingParams(), SamplingParams())
    [right, _] = draw_tokens(logits, draws).token_ids.tolist()
    assert _verdict(logits, draws, [right, 3]) is None
    assert _verdict(logits, draws, [5, 3]) is not None
    expected = draw_tokens(logits, draws)
    finite = replace(expected, best=expected.best.nan_to_num())
    assert draw_difference(finite, expected, logits, draws)[1] is not None
