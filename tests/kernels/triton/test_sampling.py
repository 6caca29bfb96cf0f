"""Draws on the device against the reference's."""

from dataclasses import replace

import pytest
import torch

from moebius_kernels import sampling as reference
from moebius_kernels.triton.sampling import draw_tokens
from moebius_worker.engine.drawing import draws_of
from moebius_worker.engine.types import SampleRow, SamplingParams
from moebius_worker.preflight.machine import Cuda
from tests.kernels.paged_world import DEVICE
from tests.worker.preflight.draw_world import MACHINE, examine

pytestmark = pytest.mark.usefixtures("poisoned")

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1e-6},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 1 << 20},
]


def rows_of(kinds, step=7):
    return [
        SampleRow(SamplingParams(**kind, seed=row), (), range(step * row)) for row, kind in enumerate(kinds)
    ]


def logits_of(rows, vocab, seed=0):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def check(logits, draws):
    """Draws of logits, the reference's."""
    expected = reference.draw_tokens(logits, draws)
    found = draw_tokens(logits.to(DEVICE), draws_on_device(draws))
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(found.best.cpu(), expected.best)
    return expected.token_ids


def draws_on_device(draws):
    return replace(
        draws,
        **{
            name: getattr(draws, name).to(DEVICE)
            for name in ("streams", "positions", "temperature", "top_k", "top_p", "log_min_p")
        },
    )


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:4]], ids=["truncated", "whole"])
@pytest.mark.parametrize(("vocab", "candidates"), [(1, 1024), (700, 1024), (1025, 40), (2500, 200)])
def test_the_same_tokens_as_the_reference(vocab, candidates, kinds):
    """With few candidates the most probable tokens do not hold enough of the mass."""
    logits = logits_of(len(kinds), vocab, vocab)
    draws = draws_of(rows_of(kinds), torch.device("cpu"))
    assert draws.truncated == (kinds is KINDS)
    if draws.truncated:
        draws = replace(draws, top_k=draws.top_k.clamp(max=candidates), candidates=candidates)
    check(logits, draws)


def test_values_that_are_equal_at_the_edge_of_what_is_kept_too():
    kinds = [KINDS[0], *KINDS[4:9]] * 4
    logits = (logits_of(len(kinds), 1500) / 2).round()
    check(logits, draws_of(rows_of(kinds), torch.device("cpu")))
    check(torch.zeros_like(logits), draws_of(rows_of(kinds), torch.device("cpu")))


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_any_number_of_rows_wherever_their_numbers_begin(count):
    kinds = [KINDS[1 + row % 12] for row in range(count)]
    check(logits_of(count, 1100), draws_of(rows_of(kinds), torch.device("cpu")))


def test_tokens_that_are_barred_are_never_drawn():
    """What masks leave is the reference's business no less than the kernel's."""
    logits = logits_of(len(KINDS), 1500)
    barred = torch.ones(1500, dtype=torch.bool)
    barred[[3, 800, 1023, 1499]] = False
    logits[:, barred] = float("-inf")
    found = check(logits, draws_of(rows_of(KINDS), torch.device("cpu")))
    assert not barred[found].any()
    only = torch.full((len(KINDS), 1500), float("-inf"))
    only[:, 1400] = -7.0
    assert set(check(only, draws_of(rows_of(KINDS), torch.device("cpu"))).tolist()) == {1400}


def test_rows_do_not_depend_on_each_other_and_large_seeds():
    rows = [
        SampleRow(SamplingParams(seed=seed), (), range(at))
        for seed, at in [(0, 3), (1, 5), ((1 << 63) + 5, 1 << 20), ((1 << 64) - 1, 0)]
    ]
    logits = logits_of(1, 300).expand(4, -1)
    together = check(logits, draws_of(rows, torch.device("cpu"))).tolist()
    assert together == [check(logits[:1], draws_of([row], torch.device("cpu"))).item() for row in rows]


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS[:6])
def test_a_row_that_is_not_finite_is_told(fault, kind):
    logits = logits_of(2, 300)
    logits[0, 200] = fault
    for compute in (draw_tokens, reference.draw_tokens):
        found = compute(logits.to(DEVICE), draws_of(rows_of([kind, kind]), DEVICE))
        assert found.best.isfinite().tolist() == [False, True]
        assert ((found.token_ids >= 0) & (found.token_ids < 300)).all()


def test_a_row_without_any_token_is_told():
    logits = torch.full((2, 300), float("-inf"))
    for compute in (draw_tokens, reference.draw_tokens):
        found = compute(logits.to(DEVICE), draws_of(rows_of(KINDS[1:3]), DEVICE))
        assert not found.best.isfinite().any()
        assert ((found.token_ids >= 0) & (found.token_ids < 300)).all()


def test_it_proves_itself_at_every_gate():
    """With a GPU, a real graph among them."""
    machine = Cuda() if DEVICE.type == "cuda" else MACHINE
    plan = examine(draw_tokens, machine, DEVICE)
    assert plan.choices
    for choice in plan.choices:
        [verdict] = [one for one in choice.verdicts if one.backend == "candidate"]
        assert verdict.rejected is None, verdict
        assert verdict.captured
