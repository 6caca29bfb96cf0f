"""What each sampling parameter does, and what a draw depends on."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from moebius_kernels.sampling import Drawn, Draws, stream_of
from moebius_worker.engine.drawing import draws_of
from moebius_worker.engine.sampler import NonFiniteLogitsError, SampleRow, choose, sample
from moebius_worker.engine.token_masks import mask_logits
from moebius_worker.engine.types import SamplingParams

VOCAB = 50
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def logits_of(rows, seed=0, vocab=VOCAB, scale=2.0):
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def row(prompt=(), output=(), banned=(), **params):
    return SampleRow(SamplingParams(**params), tuple(prompt), tuple(output), frozenset(banned))


def tokens(logits, rows):
    return [one.token_id for one in sample(logits, rows)]


def draws(logits, count, **params):
    """Token ids of `count` draws of one row of logits, each with its own seed."""
    rows = [row(seed=seed, **params) for seed in range(count)]
    return tokens(logits.expand(count, -1), rows)


def naive_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """With sorting, one token after another, in fp64."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    kept = order[:top_k] if top_k else order
    total, before, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if before < top_p * total:
            nucleus.append(token)
        before += weights[token]
    nucleus = [token for token in nucleus if weights[token] >= min_p]
    total = sum(weights[token] for token in nucleus)
    return {token: weights[token] / total for token in nucleus}


DISTRIBUTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=str)
def test_draws_are_distributed_as_they_should(params):
    logits = logits_of(1)
    expected = naive_probabilities(logits[0].tolist(), **params)
    count = 20000
    seen = Counter(draws(logits, count, **params))
    assert seen.keys() <= expected.keys()
    # Chi-squared over tokens that are expected often enough; its mean is the degrees of freedom.
    often = [token for token, share in expected.items() if share * count >= 10]
    chi = sum((seen[token] - expected[token] * count) ** 2 / (expected[token] * count) for token in often)
    assert chi < len(often) + 5 * math.sqrt(2 * len(often))


def test_positions_of_one_seed_are_as_independent_as_seeds():
    logits = logits_of(1)
    expected = naive_probabilities(logits[0].tolist())
    count = 20000
    rows = [SampleRow(SamplingParams(seed=3), (), range(position)) for position in range(count)]
    drawn = tokens(logits.expand(count, -1), rows)
    best = max(expected, key=expected.get)
    share = expected[best]
    assert abs(drawn.count(best) / count - share) < 5 * math.sqrt(share * (1 - share) / count)
    pairs = sum(a == b == best for a, b in itertools.pairwise(drawn)) / (count - 1)
    assert abs(pairs - share**2) < 5 * math.sqrt(share**2 * (1 - share**2) / count)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = logits_of(1, vocab=1000, scale=0.5)

    def drawn(**changes):
        return tokens(logits, [row(**({"output": [1, 2], "seed": 5} | changes))])[0]

    assert drawn() == drawn() == drawn(output=[3, 4]) == drawn(prompt=[9] * 100)
    assert len({drawn(seed=seed) for seed in range(20)}) > 15
    assert len({drawn(output=[0] * position) for position in range(20)}) > 15
    assert drawn(seed=2**64 - 1) != drawn(seed=2**63 - 1)


def test_a_row_does_not_see_its_batch():
    rows = [
        row(seed=1),
        row(temperature=0),
        row(seed=2, top_k=3),
        row(seed=3, top_p=0.6, temperature=1.5, logprobs=3),
        row(seed=4, min_p=0.3, output=[4, 4, 5]),
        row(prompt=[1, 2], output=[3], repetition_penalty=1.3, presence_penalty=0.5, seed=9),
        row(temperature=0, logprobs=0),
        row(seed=6, banned=[7], logit_bias={3: 2.0}),
    ] * 5
    logits = logits_of(len(rows), vocab=3000)
    together = sample(logits, rows)
    assert together == [sample(logits[index : index + 1], [one])[0] for index, one in enumerate(rows)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [rows[index] for index in order])
    assert shuffled == [together[index] for index in order]


@needs_gpu
def test_a_gpu_draws_as_the_cpu_does():
    logits = logits_of(300, vocab=3000)
    for params in ({}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05, "temperature": 1.4}):
        rows = [row(seed=seed, **params) for seed in range(len(logits))]
        assert tokens(logits.cuda(), rows) == tokens(logits, rows)


def test_noise_in_the_last_bits_does_not_change_draws():
    logits = logits_of(1, vocab=2000)
    noise = 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    for params in ({}, {"top_p": 0.9}):
        exact, disturbed = draws(logits, 2000, **params), draws(logits + noise, 2000, **params)
        assert sum(a != b for a, b in zip(exact, disturbed, strict=True)) <= 1


def test_draws_are_fixed_for_all_time():
    """A replay on a worker of another version must draw the same."""
    logits = 0.05 * torch.arange(VOCAB).expand(12, -1)
    rows = [SampleRow(SamplingParams(seed=number), (), range(number)) for number in range(12)]
    assert tokens(logits, rows) == [47, 49, 25, 38, 16, 36, 20, 34, 19, 41, 37, 48]


def test_greedy_takes_the_best_whatever_the_seed():
    logits = logits_of(4)
    assert tokens(logits, [row(temperature=0, seed=seed) for seed in range(4)]) == logits.argmax(-1).tolist()
    assert draws(logits[:1], 50, temperature=1e-9) == [int(logits[0].argmax())] * 50


def test_a_nucleus_wider_than_the_first_candidates():
    flat = torch.zeros(1, 5000)
    flat[0, :4000] = 1.0 + torch.arange(4000) * 1e-5
    drawn = draws(flat, 400, top_p=0.5)
    share = 4000 * math.e / (4000 * math.e + 1000)
    lowest = 4000 - 4000 * 0.5 / share
    assert min(drawn) >= lowest - 60
    assert min(drawn) < lowest + 200
    assert max(drawn) < 4000


def test_top_k_beyond_the_vocabulary_is_no_limit():
    logits = logits_of(1)
    assert draws(logits, 50, top_k=10**6) == draws(logits, 50)


def test_logit_bias():
    logits = logits_of(1)
    best = int(logits.argmax())
    assert tokens(logits, [row(temperature=0, logit_bias={13: 100.0, best: -100.0})]) == [13]
    assert tokens(logits, [row(temperature=0, logit_bias={VOCAB + 5: 100.0})]) == [best]


def test_banned_tokens_are_never_drawn():
    logits = logits_of(1)
    best = logits[0].topk(3).indices.tolist()
    fourth = int(logits[0].topk(4).indices[3])
    assert tokens(logits, [row(temperature=0, banned=[*best, VOCAB + 1])]) == [fourth]
    assert not set(best) & set(draws(logits, 300, banned=best))
    # A bias does not lift a ban.
    assert tokens(logits, [row(temperature=0, banned=best, logit_bias={best[0]: 100.0})]) == [fourth]


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -0.4, "presence_penalty": -0.2},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "logit_bias": {3: 1.5, 20: -2},
        },
    ],
    ids=str,
)
def test_penalties_equal_a_naive_reference(penalties):
    logits = logits_of(1)
    prompt, output = [1, 2, 2, 3, 8], [3, 3, 3, 8, 9, 11]
    expected = logits[0].tolist()
    for token in range(VOCAB):
        factor = penalties.get("repetition_penalty", 1)
        if token in prompt or token in output:
            expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
        if token in output:
            expected[token] -= penalties.get("presence_penalty", 0)
        expected[token] -= output.count(token) * penalties.get("frequency_penalty", 0)
        expected[token] += penalties.get("logit_bias", {}).get(token, 0)
    before = logits.clone()
    (one,) = sample(logits, [row(prompt, output, temperature=0, logprobs=VOCAB, **penalties)])
    assert torch.equal(logits, before)
    log_probabilities = torch.tensor(expected).log_softmax(0)
    assert dict(one.logprobs.top) == pytest.approx(dict(enumerate(log_probabilities.tolist())), abs=1e-5)
    assert log_probabilities.tolist() != pytest.approx(logits[0].log_softmax(0).tolist(), abs=1e-3)


def test_logprobs_are_before_temperature_and_truncation():
    logits = logits_of(1)
    expected = logits[0].log_softmax(0)
    top = expected.topk(4)
    for params in ({"temperature": 0}, {"temperature": 0.1, "top_k": 2}, {"temperature": 3.0, "seed": 1}):
        (one,) = sample(logits, [row(logprobs=4, **params)])
        assert one.logprobs.logprob == pytest.approx(float(expected[one.token_id]), abs=1e-5)
        assert [token for token, _ in one.logprobs.top] == top.indices.tolist()
        assert [value for _, value in one.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_are_given_to_those_who_asked():
    none, zero, two, many = sample(
        logits_of(4),
        [
            row(temperature=0),
            row(temperature=0, logprobs=0),
            row(temperature=0, logprobs=2),
            row(temperature=0, logprobs=99),
        ],
    )
    assert none.logprobs is None
    assert zero.logprobs.top == ()
    assert zero.logprobs.logprob < 0
    assert len(two.logprobs.top) == 2
    assert len(many.logprobs.top) == VOCAB


def test_no_rows():
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_their_rows(bad):
    logits = logits_of(4)
    logits[1, 7] = logits[3, 0] = bad
    with pytest.raises(NonFiniteLogitsError) as error:
        sample(logits, [row(temperature=0)] * 4)
    assert error.value.rows == (1, 3)


def test_everything_banned_is_an_error():
    with pytest.raises(NonFiniteLogitsError):
        sample(logits_of(1), [row(banned=range(VOCAB))])


def allowing(vocab, token_ids):
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("vocab", [31, 32, 100])
def test_a_mask_leaves_what_it_allows_in_its_row_alone(device, vocab):
    logits = torch.randn(3, vocab, device=device)
    allowed = [0, 7, vocab - 1]
    rows = [row(), SampleRow(SamplingParams(), (), (), allowed=allowing(vocab, allowed))]
    masked = mask_logits(logits, [rows[0], rows[1], rows[0]])
    assert torch.equal(masked[0], logits[0])
    assert torch.equal(masked[2], logits[2])
    expected = torch.full((vocab,), -torch.inf, device=device)
    expected[allowed] = logits[1, allowed]
    assert torch.equal(masked[1], expected)
    assert torch.equal(mask_logits(logits, [rows[1]] * 3)[1], expected)
    assert mask_logits(logits, [rows[0]] * 3) is logits


def test_draws_are_the_operations() -> None:
    """What the plan chose computes them; a batch that takes the best tokens needs it not."""
    logits, rows = logits_of(3), [row(seed=1), row(temperature=0), row(top_k=2)]
    asked: list[tuple[int, bool]] = []

    def draw_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
        asked.append((len(logits), draws.truncated))
        return Drawn(torch.tensor([5, 6, 7])[: len(logits)], logits.amax(-1))

    sampled = sample(logits, rows, draw_tokens=draw_tokens)
    assert [one.token_id for one in sampled] == [5, 6, 7]
    sample(logits[:2], rows[:2], draw_tokens=draw_tokens)
    sample(logits[:1], rows[1:2], draw_tokens=draw_tokens)
    assert asked == [(3, True), (2, False)]


def test_what_draws_need_of_all_rows_is_one_copy() -> None:
    rows = [
        row(seed=-(2**63), output=range(7), temperature=0.5, top_k=3, top_p=0.25),
        row(seed=2**63 - 1, temperature=0, min_p=0.5),
        row(seed=9, output=range(2), temperature=1.5, top_k=2000),
    ]
    found = draws_of(rows, torch.device("cpu"))
    expected = {
        "streams": torch.tensor([stream_of(one.params.seed) for one in rows]),
        "positions": torch.tensor([7, 0, 2]),
        "temperature": torch.tensor([0.5, 0.0, 1.5]),
        "top_k": torch.tensor([3, 0, 2000], dtype=torch.int32),
        "top_p": torch.tensor([0.25, 1.0, 1.0]),
        "log_min_p": torch.tensor([-math.inf, math.log(0.5), -math.inf]),
    }
    assert found.candidates == 2000
    for name, column in expected.items():
        assert getattr(found, name).dtype == column.dtype, name
        assert torch.equal(getattr(found, name), column), name
    assert len({getattr(found, name).untyped_storage().data_ptr() for name in expected}) == 1


def test_a_best_logit_that_is_not_finite_draws_nothing() -> None:
    logits = logits_of(5)
    for number, value in enumerate((math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max)):
        logits[number] = torch.tensor(value)
    for params in ({}, {"temperature": 0}):
        rows = [row(seed=number, **params) for number in range(5)]
        assert [one >= 0 for one in choose(logits, rows).tolist()] == [False, False, False, True, True]
