"""Generations that are not read to the end, or late: deadlines, cancellations, the gateway's stop."""

import asyncio
import contextlib
import random
import time

import pytest

from moebius_gateway.types import FinishReason, GenerationError, Reason
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import SLOW, Seen, begin, cluster, consume, generation
from tests.gateway.worker_standin import Plan, undisturbed
from tests.waiting import until

# Seconds, in tests that do not wait for them.
DEADLINE = 50.0


async def pass_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is later on the event loop's clock, and what was due by then has happened."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + DEADLINE)
    await asyncio.sleep(0.01)


async def test_no_worker_until_the_deadline() -> None:
    async with cluster(1) as it:
        it.workers[0].become(pb.STATE_FAILED)
        await until(lambda: not it.gateway.ready())
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation(seconds=0.3))
        assert failed.value.reason is Reason.NOT_READY
        assert failed.value.retryable
        assert it.gateway.idle()


async def test_a_deadline_in_mid_stream_ends_it_at_the_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(1, SLOW) as it:
        seen, wanted = Seen(), generation(max_tokens=1000, seconds=DEADLINE)
        task = asyncio.create_task(consume(it.gateway, wanted, seen))
        await until(lambda: len(seen.tokens) > 5)
        await pass_deadline(monkeypatch)
        with pytest.raises(GenerationError) as failed:
            await task
        assert failed.value.reason is Reason.NOT_READY
        assert f"after {len(seen.tokens)} tokens" in failed.value.message
        await until(lambda: not it.workers[0].running)
        assert it.gateway.idle()


async def test_the_deadline_holds_for_a_slow_consumer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(1) as it:
        stream = it.gateway.stream(generation(max_tokens=1000, seconds=DEADLINE))
        await anext(stream)
        await pass_deadline(monkeypatch)
        with pytest.raises(GenerationError, match="deadline passed"):
            await anext(stream)
        assert it.gateway.idle()


async def test_what_was_finished_in_time_may_be_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        cluster(1) as it,
        contextlib.aclosing(it.gateway.stream(generation(max_tokens=5, seconds=DEADLINE))) as stream,
    ):
        await anext(stream)
        await until(lambda: not it.gateway.workers()[0].in_flight)
        await pass_deadline(monkeypatch)
        assert (await anext(stream)).finish_reason is FinishReason.LENGTH


async def test_a_slow_consumer_gets_what_piled_up_at_once() -> None:
    async with cluster(1) as it, contextlib.aclosing(it.gateway.stream(generation(max_tokens=20))) as stream:
        first = await anext(stream)
        await until(lambda: not it.gateway.workers()[0].in_flight)
        rest = await anext(stream)
        assert (*first.token_ids, *rest.token_ids) == undisturbed((5, 6, 7), 1, 20)
        assert rest.finish_reason is FinishReason.LENGTH


async def test_closing_cancels_at_the_worker() -> None:
    async with cluster(1, SLOW) as it:
        stream = it.gateway.stream(generation(max_tokens=1000))
        await anext(stream)
        await stream.aclose()
        assert it.gateway.idle()
        await until(lambda: it.workers[0].cancels and not it.workers[0].running)


@pytest.mark.parametrize("paused", [True, False])
async def test_cancelling_the_consumer_cancels_at_the_worker(paused: bool) -> None:
    async with cluster(1, SLOW) as it:
        it.workers[0].paused = paused
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=1000)))
        await until(lambda: it.workers[0].running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert it.gateway.idle()
        await until(lambda: it.workers[0].cancels and not it.workers[0].running)


async def test_a_thousand_generations_with_aborts_leave_nothing() -> None:
    chance = random.Random(7)
    async with cluster(2, Plan(rate=200)) as it:

        async def one(seed: int) -> None:
            task = asyncio.create_task(consume(it.gateway, generation(seed=seed, max_tokens=5)))
            if seed % 10 < 3:
                await asyncio.sleep(chance.uniform(0, 0.05))
                task.cancel()
                await asyncio.wait([task])
            else:
                assert tuple((await task).tokens) == undisturbed((5, 6, 7), seed, 5)

        for start in range(0, 1000, 200):
            await asyncio.gather(*(one(seed) for seed in range(start, start + 200)))
        assert it.gateway.idle()
        assert it.gateway.metric("strikes_total") == 0
        await until(lambda: not any(worker.running for worker in it.workers))
        for link in it.gateway._links.values():
            assert not link._attempts
            await until(link._outbox.empty)


async def test_stopping_ends_everything() -> None:
    async with cluster(2, SLOW) as it:
        begun = await begin(it, 4, max_tokens=1000)
        it.workers[0].become(pb.STATE_LOADING)
        await it.gateway.stop()
        for _, task in begun:
            with pytest.raises(GenerationError) as failed:
                await task
            assert failed.value.reason is Reason.NOT_READY
        await until(lambda: not any(worker.gateways or worker.running for worker in it.workers))
        assert it.gateway.idle()
        mine = asyncio.current_task()
        left = [
            task for task in asyncio.all_tasks() if task is not mine and task.get_name().startswith("link")
        ]
        assert not left
