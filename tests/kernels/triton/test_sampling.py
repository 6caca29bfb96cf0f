"""Draws on the device against the worker's."""

import math

import pytest
import torch

from moebius_kernels.triton.sampling import Draws, draw_tokens, top_logprobs
from moebius_worker.engine.draw import stream_of
from moebius_worker.engine.sampler import SampleRow, sample
from moebius_worker.engine.types import SamplingParams
from tests.kernels.paged_world import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned")


def draws_of(params, positions, candidates=1024):
    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return Draws(
        column([stream_of(one.seed) for one in params], torch.int64),
        column(positions, torch.int64),
        column([one.temperature for one in params], torch.float32),
        column([one.top_k for one in params], torch.int32),
        column([one.top_p for one in params], torch.float32),
        column([math.log(one.min_p) if one.min_p else -math.inf for one in params], torch.float32),
        max(candidates, *(one.top_k for one in params))
        if any(one.top_k or one.top_p < 1 for one in params)
        else 0,
    )


KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1e-6},
    {"temperature": 3.0, "top_p": 0.999},
]


@pytest.mark.parametrize(("vocab", "candidates"), [(1, 1024), (700, 1024), (1500, 40), (1500, 200)])
def test_the_same_tokens_as_the_workers(vocab, candidates):
    """With few candidates the most probable tokens do not hold enough of the mass."""
    params = [SamplingParams(**kind, seed=seed) for seed, kind in enumerate(KINDS)]
    positions = [7 * index for index in range(len(params))]
    logits = 3 * torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(vocab))
    # Values that are equal, at the edge of what is kept too.
    logits[3] = (2 * logits[3]).round() / 2
    logits[5] = logits[5].round()
    rows = [SampleRow(one, (), (0,) * at) for one, at in zip(params, positions, strict=True)]
    expected = [sampled.token_id for sampled in sample(logits, rows)]
    token_ids, best = draw_tokens(logits.to(DEVICE), draws_of(params, positions, candidates))
    assert token_ids.tolist() == expected
    assert torch.equal(best.cpu(), logits.amax(-1))


def test_rows_do_not_depend_on_each_other_and_large_seeds():
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (0, 1, (1 << 63) + 5, (1 << 64) - 1)]
    logits = (
        torch.randn(1, 300, generator=torch.Generator().manual_seed(1)).expand(4, -1).contiguous().to(DEVICE)
    )
    together, _ = draw_tokens(logits, draws_of(params, [3, 5, 1 << 20, 0]))
    alone = [
        draw_tokens(logits[:1], draws_of([one], [at]))[0].item()
        for one, at in zip(params, [3, 5, 1 << 20, 0], strict=True)
    ]
    assert together.tolist() == alone
    rows = [SampleRow(one, (), (0,) * at) for one, at in zip(params[:2], [3, 5], strict=True)]
    assert alone[:2] == [sampled.token_id for sampled in sample(logits[:2].cpu(), rows)]


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS[:5])
def test_a_row_that_is_not_finite_is_told(fault, kind):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[0, 200] = fault
    token_ids, best = draw_tokens(logits, draws_of([SamplingParams(**kind)] * 2, [0, 0]))
    assert best.isfinite().tolist() == [False, True]
    assert ((token_ids >= 0) & (token_ids < 300)).all()


def test_logprobs():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rows = [SampleRow(SamplingParams(temperature=0.0, logprobs=4), (), ())] * 3
    sampled = sample(logits.cpu(), rows)
    own, ids, values = top_logprobs(logits, torch.tensor([one.token_id for one in sampled], device=DEVICE), 4)
    for row, one in enumerate(sampled):
        assert own[row].item() == pytest.approx(one.logprobs.logprob, abs=1e-5)
        assert ids[row].tolist() == [token for token, _ in one.logprobs.top]
        assert values[row].tolist() == pytest.approx([value for _, value in one.logprobs.top], abs=1e-5)
