"""The engine whole, with each kind of cache: what a request gets does not depend on who else is there."""

import random
import time
from pathlib import Path

import pytest
import torch

from moebius_kernels.kv_pages import KvFormat
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.memory import OutOfMemoryPlan
from tests.worker.engine.engine_world import (
    MODELS,
    Engine,
    is_empty,
    load,
    tokens,
    with_pools,
    write_model,
)

LENGTH = pb.FINISH_REASON_LENGTH
KINDS = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind) for kind in MODELS}


def alone(path: Path, **options: object) -> Engine:
    """With room for anything."""
    return Engine(load(path, **options))


@KINDS
@pytest.mark.parametrize("page_size", [1, 7])
def test_texts_are_those_of_requests_alone(models: dict[str, Path], kind: str, page_size: int) -> None:
    """Prompts share beginnings, are longer than a step, are preempted, some are cancelled at any moment."""
    source, roomy = random.Random(page_size), alone(models[kind], page_size=page_size)
    engine = Engine(with_pools(roomy.runner, 96, 64), max_running=9)
    shared = tokens(24, seed=5)
    prompts = {
        handle: shared[: source.choice([0, page_size, 12, 24])] + tokens(source.randint(1, 20), seed=handle)
        for handle in range(1, 17)
    }
    waiting, cancelled = list(prompts), set()
    while waiting or any(not seen.ended for h, seen in engine.seen.items() if h not in cancelled):
        for _ in range(min(len(waiting), source.choice([0, 1, 4]))):
            engine.submit(handle := waiting.pop(), prompts[handle], max_tokens=source.randint(10, 30))
        if engine.seen and source.random() < 0.03:
            cancelled.add(handle := source.choice(list(engine.seen)))
            engine.cancel(handle)
        engine.turn()
    engine.finish()
    assert is_empty(engine)
    assert engine.loop.stats().preemptions > 0, "the pools are too large for this test"
    for handle, seen in engine.seen.items():
        assert seen.finish == LENGTH or handle in cancelled
        if seen.tokens:
            expected = roomy.answer(prompts[handle], max_tokens=len(seen.tokens))
            assert seen.tokens == expected.tokens, f"request {handle}"


@KINDS
def test_the_longest_request(models: dict[str, Path], kind: str) -> None:
    """Of 48 tokens together, which the pages are exactly enough for."""
    engine = Engine(with_pools(load(models[kind]), 48, 48))
    text = tokens(48)
    whole = engine.answer(text[:47], max_tokens=100)
    assert (len(whole.tokens), whole.finish) == (1, LENGTH)
    cut = engine.answer(text[:20], max_tokens=100)
    assert (len(cut.tokens), cut.finish) == (28, LENGTH)
    refused = engine.answer(text)
    assert refused.error is not None
    assert (refused.error.reason, refused.error.retryable) == (pb.REASON_BAD_REQUEST, False)
    assert "leave no room" in refused.error.message
    assert is_empty(engine)


@KINDS
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17, 32])
def test_prompts_of_whole_pages_and_steps_and_one_more_or_less(
    models: dict[str, Path], kind: str, length: int
) -> None:
    """Pages have 4 tokens, steps 16. Again, and with what was said before, they come from the cache."""
    engine, text = alone(models[kind]), tokens(length, seed=length)
    first = engine.answer(text)
    again = engine.answer(text)
    assert (first.cached, again.tokens) == (0, first.tokens)
    # The last token is computed anew, since its logits are wanted.
    assert again.cached == (length - 1) // 4 * 4
    turn = engine.answer([*text, *first.tokens, 7])
    assert turn.tokens == alone(models[kind]).answer([*text, *first.tokens, 7]).tokens
    # A state is kept at ends of pages of a prompt, and where a text ends if that is one.
    assert turn.cached >= (length - 1) // 4 * 4
    assert kind == "states" or turn.cached == (length + 7) // 4 * 4


@KINDS
def test_the_same_prompt_many_times_at_once(models: dict[str, Path], kind: str) -> None:
    """More than there are places. Those that begin later need not compute what the first one did."""
    engine, text = Engine(load(models[kind])), tokens(40, seed=1)
    for handle in range(1, 10):
        engine.submit(handle, text)
    engine.finish()
    expected = alone(models[kind]).answer(text).tokens
    assert [seen.tokens for seen in engine.seen.values()] == [expected] * 9
    assert all(engine.seen[handle].cached >= 32 for handle in range(5, 10))
    assert engine.loop.stats().cached_tokens == sum(seen.cached for seen in engine.seen.values())
    assert is_empty(engine)


@KINDS
def test_a_cancelled_request_is_gone_with_the_next_step(models: dict[str, Path], kind: str) -> None:
    """While it waits, in its prefill, while it decodes; twice; and before it comes."""
    for turns in range(8):
        engine = Engine(load(models[kind]), max_running=1)
        engine.submit(1, tokens(40), max_tokens=6)
        engine.submit(2, tokens(5, seed=2), max_tokens=6)
        engine.cancel(3)
        for _ in range(turns):
            engine.turn()
        engine.cancel(1)
        engine.cancel(1)
        engine.turn()
        assert engine.loop.stats().running <= 1
        said = list(engine.seen[1].tokens)
        engine.finish()
        assert engine.seen[1].tokens == said
        assert len(engine.seen[2].tokens) == 6
        assert is_empty(engine)


def test_a_deadline_counts_until_the_first_step(models: dict[str, Path]) -> None:
    engine = Engine(load(models["full"]), max_running=1)
    engine.submit(1, tokens(30), max_tokens=20, deadline_ms=60_000)
    engine.submit(2, tokens(30), deadline_ms=1)
    engine.turn()
    time.sleep(0.002)
    engine.finish()
    assert len(engine.seen[1].tokens) == 20
    error = engine.seen[2].error
    assert error is not None
    assert (error.reason, error.retryable) == (pb.REASON_OVERLOADED, True)


@KINDS
@pytest.mark.parametrize("kv_format", [KvFormat.FP8, KvFormat.INT8])
def test_quantised_keys_and_values(models: dict[str, Path], kind: str, kv_format: KvFormat) -> None:
    """The logits' error against keys and values of the model's dtype, relative to how far logits differ."""
    text, ids = tokens(60, seed=3), list[int]()
    logits = []
    for chosen in (KvFormat.MODEL, kv_format):
        engine = alone(models[kind], kv_format=chosen)
        rows: list[torch.Tensor] = []
        step = engine.runner.step

        def keep(slices: object, progress: object, step=step, rows=rows) -> object:
            computed = step(slices, progress)
            rows.extend(computed.logits)
            return computed

        engine.runner.step = keep  # type: ignore[method-assign]
        # The same text for both: what was said first is part of it.
        engine.answer([*text, *ids], max_tokens=1)
        logits.append(rows[-1])
        # What is read of a page that another request filled is the same.
        engine.answer([*text, *ids], max_tokens=1)
        torch.testing.assert_close(rows[-1], rows[-2], atol=1e-4, rtol=0)
    error = (logits[1] - logits[0]).pow(2).mean().sqrt() / logits[0].std()
    assert 0 < error < {KvFormat.FP8: 0.1, KvFormat.INT8: 0.03}[kv_format]


@KINDS
def test_a_cache_that_is_too_small_is_refused_with_the_numbers(models: dict[str, Path], kind: str) -> None:
    with pytest.raises(OutOfMemoryPlan, match=r"does not hold one request of 64 tokens.*--kv-cache-memory"):
        load(models[kind], kv_cache_bytes=1000, max_model_len=64)
