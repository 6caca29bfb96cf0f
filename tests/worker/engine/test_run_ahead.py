"""Random lives of an engine that launches steps ahead, as it does on a GPU, and of one that does not: the
same requests get the same answers. The models are tiny, and computed on a CPU, in the order of the launches.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.run_ahead import RunAhead
from moebius_worker.engine.runner import ModelRunner
from moebius_worker.engine.sampler import choose
from moebius_worker.engine.types import SampleRow, SamplingParams, Slice
from tests.worker.engine.engine_world import (
    MODELS,
    VOCAB,
    Engine,
    decodes,
    is_empty,
    load,
    tokens,
    with_pools,
    write_model,
)

KINDS = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    return {kind: load(write_model(tmp_path_factory.mktemp(kind), kind)) for kind in MODELS}


def fields(draw: random.Random) -> dict[str, Any]:
    """How a request wants its answer; most of them in a way that can be drawn ahead."""
    sampling = {"top_p": 1.0, "repetition_penalty": 1.0, "seed": draw.randrange(2**40)}
    if draw.random() < 0.5:
        sampling |= {"temperature": draw.choice([0.3, 1.0]), "top_k": draw.choice([0, 5])}
        sampling |= {"top_p": draw.choice([1.0, 0.8]), "min_p": draw.choice([0.0, 0.01])}
    if draw.random() < 0.04:
        sampling |= draw.choice(
            [
                {"repetition_penalty": 1.2},
                {"frequency_penalty": 0.5},
                {"presence_penalty": 0.5},
                {"logprobs": 2},
            ]
        )
    chosen: dict[str, Any] = {
        "sampling": pb.Sampling(**sampling),
        "max_tokens": draw.choice([1, 2, 20, 30, 40]),
    }
    if draw.random() < 0.6:
        chosen["stop_token_ids"] = draw.sample(range(VOCAB), 15)
        chosen["min_tokens"] = draw.choice([0, 0, 0, 5])
    return chosen | {"quarantined": draw.random() < 0.02, "priority": draw.choice([0, 0, 0, 1, -1])}


def live(engine: Engine, seed: int) -> tuple[set[int], int]:
    """Requests come and some are cancelled; returns those, and how many steps were launched."""
    draw = random.Random(seed)
    launched = 0
    texts = [tokens(count, seed=count) for count in (3, 12, 25)]
    cancelled: set[int] = set()
    ahead = engine.loop._ahead
    if ahead is not None:
        launch = ahead.launch

        def counting(slices: Any, rows: Any, before: Any) -> Any:
            nonlocal launched
            launched += before is not None
            return launch(slices, rows, before)

        ahead.launch = counting  # type: ignore[method-assign]
    for handle in range(1, 25):
        text = draw.choice(texts)
        prompt = text[: draw.randint(1, len(text))] + tokens(draw.randint(0, 4), seed=handle)
        engine.submit(handle, prompt, **fields(draw))
        for _ in range(draw.choice([0, 1, 3, 20, 30])):
            engine.turn()
        # Who is cancelled is the same for both; what it has said by then is not.
        if draw.random() < 0.15:
            cancelled.add(victim := draw.randint(1, handle))
            engine.cancel(victim)
    engine.finish()
    return cancelled, launched


@KINDS
@pytest.mark.parametrize("pages", [200, 20], ids=["many pages", "few pages"])
def test_the_same_answers(models: dict[str, ModelRunner], kind: str, pages: int) -> None:
    total = 0
    for seed in range(2):
        engines = []
        for ahead in (False, True):
            runner = with_pools(models[kind], 4 * pages, 80)
            engines.append(Engine(runner, ahead=ahead, max_running=4, snapshot_interval=8))
        (cancelled, none), (_, launched) = (live(engine, seed) for engine in engines)
        plain, ahead = engines
        assert none == 0
        total += launched
        for handle, expected in plain.seen.items():
            found = ahead.seen[handle]
            if handle in cancelled and not (expected.ended and found.ended):
                short, long = sorted((found.tokens, expected.tokens), key=len)
                assert long[: len(short)] == short
            else:
                assert (found.tokens, found.finish) == (expected.tokens, expected.finish), (seed, handle)
                assert found.error == expected.error
        assert is_empty(plain)
        assert is_empty(ahead)
        preemptions = [engine.loop.stats().preemptions for engine in engines]
        assert all(preemptions) if pages == 20 else True
    assert total > 100


@KINDS
def test_what_an_answer_left_in_the_caches_is_right(models: dict[str, ModelRunner], kind: str) -> None:
    """Each turn goes on from all that was said, and the answers end by stop tokens."""
    plain, ahead = (
        Engine(with_pools(models[kind], 800, 200), ahead=ahead, snapshot_interval=4)
        for ahead in (False, True)
    )
    text = tokens(9)
    for turn in range(12):
        length = {"max_tokens": 5 + turn % 4}
        expected = plain.answer(text, **length)
        # The first of these ids in the answer ends it.
        stops = [expected.tokens[-1 - turn % 3]]
        said, found = (
            plain.answer(text, stop_token_ids=stops, **length),
            ahead.answer(text, stop_token_ids=stops, **length),
        )
        assert (found.tokens, found.finish) == (said.tokens, said.finish)
        text = [*text, *found.tokens, 5 + turn]
    assert ahead.loop.stats().cached_tokens > 100
    assert is_empty(ahead)


class OneBuffer:
    """Its logits lie in the same memory in every step, as those of a CUDA graph do. The next token is the
    best; after 9 nothing is finite."""

    def __init__(self) -> None:
        self.logits = torch.zeros(3, 12)

    def launch(self, slices: Sequence[Slice], drawn: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.logits[: len(slices)].zero_()
        for row, piece in zip(rows, slices, strict=True):
            token = piece.token_ids[0] if drawn is None else int(drawn[~piece.token_ids[0]])
            row[token + 1] = 1
            if token == 9:
                row.fill_(torch.nan)
        return rows


def test_what_a_step_drew_is_its_own_and_always_in_the_vocabulary() -> None:
    run = RunAhead(OneBuffer(), decodes, choose)  # type: ignore[arg-type]
    rows = [SampleRow(SamplingParams(temperature=0), (1,), ())] * 3
    first = run.launch(
        [Slice(at, (token,), 1, (at,), True) for at, token in enumerate((4, 9, 2))], rows, None
    )
    # Those of the third and of the second: of one there is nothing to go on with.
    second = run.launch([Slice(2, (~2,), 2, (2,), True), Slice(1, (~1,), 2, (1,), True)], rows[:2], first)
    assert first.collect() == [5, -1, 3]
    assert first.drawn.tolist() == [5, 0, 3]
    assert second.collect() == [4, 1]
