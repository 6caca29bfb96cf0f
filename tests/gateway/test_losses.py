"""What the metrics tell of streams that lost their worker: how each ended, and the gap that a client saw."""

import asyncio
import contextlib
import time
from collections import Counter

import pytest

from moebius_gateway.types import GenerationError, Reason
from moebius_gateway.workers.losses import Losses
from tests.gateway.dispatching import Cluster, Seen, cluster, consume, generation
from tests.gateway.worker_standin import Plan
from tests.waiting import until

KILLER = 77
SLOW = Plan(rate=50)


class Written:
    def __init__(self) -> None:
        self.ends: Counter[tuple[str, str]] = Counter()
        self.gaps: list[tuple[str, float]] = []

    def loss_ended(self, reason: str, outcome: str) -> None:
        self.ends[reason, outcome] += 1

    def gap(self, reason: str, seconds: float) -> None:
        self.gaps.append((reason, seconds))


def test_all_losses_since_the_last_token_end_with_the_next_and_leave_one_gap() -> None:
    written = Written()
    with Losses(written) as losses:
        begun = time.monotonic()
        losses.delivered()
        time.sleep(0.02)
        losses.lost("ENGINE_DEAD")
        losses.lost("ENGINE_STALLED")
        time.sleep(0.02)
        losses.delivered()
        ended = time.monotonic()
        losses.delivered()
    assert written.ends == {("ENGINE_DEAD", "resumed"): 1, ("ENGINE_STALLED", "resumed"): 1}
    [(reason, seconds)] = written.gaps
    assert reason == "ENGINE_DEAD"
    assert 0.04 <= seconds <= ended - begun


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GenerationError(Reason.NOT_READY, "nobody", retryable=True), "failed"),
        (GenerationError(Reason.POISONED, "it kills", retryable=False), "poisoned"),
        (RuntimeError("a defect"), "failed"),
        (asyncio.CancelledError(), "abandoned"),
        (GeneratorExit(), "abandoned"),
    ],
    ids=["failed", "poisoned", "defect", "cancelled", "closed"],
)
def test_what_is_open_at_the_end_has_ended_so(error: BaseException, outcome: str) -> None:
    written = Written()
    with contextlib.suppress(BaseException), Losses(written) as losses:
        losses.lost("ENGINE_DEAD")
        raise error
    assert written.ends == {("ENGINE_DEAD", outcome): 1}
    assert not written.gaps


def outcomes(it: Cluster) -> Counter[tuple[str, str]]:
    """Of all migrations, those that are not zero."""
    [family] = [one for one in it.gateway.registry.collect() if one.name == "moebius_gateway_migrations"]
    counted: Counter[tuple[str, str]] = Counter()
    for sample in family.samples:
        if sample.name.endswith("_total") and sample.value:
            counted[sample.labels["reason"], sample.labels["outcome"]] = int(sample.value)
    return counted


async def test_a_stream_that_moves() -> None:
    async with cluster(2, SLOW) as it:
        seen = Seen()
        task = asyncio.create_task(consume(it.gateway, generation((5, 6, 7), max_tokens=20), seen))
        await until(lambda: len(seen.tokens) >= 5)
        died_at = len(seen.tokens)
        await it.busy().die()
        await task
        assert outcomes(it) == {("ENGINE_DEAD", "resumed"): 1}
        # The prompt, and what was delivered by then.
        assert 3 + died_at <= it.gateway.metric("tokens_replayed_total") < 3 + 20
        assert it.gateway.metric("recovery_seconds_count", reason="ENGINE_DEAD") == 1
        assert 0 < it.gateway.metric("recovery_seconds_sum", reason="ENGINE_DEAD") < 5


async def test_a_stream_whose_deadline_passes_meanwhile() -> None:
    async with cluster(1, Plan(rate=50, restart_seconds=5)) as it:
        seen = Seen()
        wanted = generation(max_tokens=100, seconds=1.0)
        task = asyncio.create_task(consume(it.gateway, wanted, seen))
        await until(lambda: len(seen.tokens) >= 3)
        dying = asyncio.create_task(it.workers[0].die())
        with pytest.raises(GenerationError):
            await task
        assert outcomes(it) == {("ENGINE_DEAD", "failed"): 1}
        dying.cancel()


async def test_a_client_that_leaves_meanwhile() -> None:
    async with cluster(1, Plan(rate=50, restart_seconds=5)) as it:
        seen = Seen()
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=100), seen))
        await until(lambda: len(seen.tokens) >= 3)
        dying = asyncio.create_task(it.workers[0].die())
        await until(lambda: it.gateway.metric("streams_waiting") == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert outcomes(it) == {("ENGINE_DEAD", "abandoned"): 1}
        dying.cancel()


async def test_poison_is_its_own_outcome() -> None:
    async with cluster(2, Plan(rate=50, killers=frozenset({KILLER}))) as it:
        with pytest.raises(GenerationError):
            await consume(it.gateway, generation((5, KILLER)))
        assert set(outcomes(it)) == {("ENGINE_DEAD", "poisoned")}


async def test_a_stream_that_loses_nothing_tells_nothing() -> None:
    async with cluster(1) as it:
        await consume(it.gateway, generation())
        assert not outcomes(it)
        assert it.gateway.metric("tokens_replayed_total") == 0
