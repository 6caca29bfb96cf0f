"""Generations that workers refuse, or for which there is none: who waits, who is told, who goes elsewhere."""

import asyncio
import time

import pytest

from moebius_gateway.types import GenerationError, Reason
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import begin, cluster, consume, finish, generation, refusal
from tests.gateway.worker_standin import Plan, undisturbed
from tests.waiting import until


async def test_backpressure_goes_elsewhere_and_never_strikes_or_ejects() -> None:
    async with cluster(2) as it:
        await consume(it.gateway, generation(max_tokens=1))
        [preferred] = [worker for worker in it.workers if worker.submits]
        for reason in (pb.REASON_OVERLOADED, pb.REASON_DRAINING, pb.REASON_NOT_READY):
            preferred.refusal = refusal(reason)
            for seed in range(5):
                seen = await consume(it.gateway, generation(seed=seed, max_tokens=3))
                assert tuple(seen.tokens) == undisturbed((5, 6, 7), seed, 3)
        assert len(preferred.submits) >= 5
        assert it.gateway.metric("strikes_total") == 0
        for port in it.ports:
            assert it.gateway.metric("ejections_total", worker=f"127.0.0.1:{port}") == 0
        preferred.refusal = None
        assert not any(view.on_trial for view in it.gateway.workers())


@pytest.mark.timed
async def test_full_everywhere_is_waited_for() -> None:
    async with cluster(2) as it:
        for worker in it.workers:
            worker.refusal = refusal(pb.REASON_OVERLOADED, seconds=0.2)
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=3)))
        await until(lambda: it.submits() >= 4 and it.gateway.metric("streams_waiting") == 1)
        for worker in it.workers:
            worker.refusal = None
        assert tuple((await task).tokens) == undisturbed((5, 6, 7), 1, 3)
        assert it.submits() <= 6, "no storm"


@pytest.mark.timed
async def test_full_everywhere_for_too_long_is_said() -> None:
    async with cluster(2, max_wait=0.7) as it:
        for worker in it.workers:
            worker.refusal = refusal(pb.REASON_OVERLOADED, seconds=0.2)
        before = time.monotonic()
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation())
        # Its deadline is at 20 s.
        assert 0.4 < time.monotonic() - before < 10
        assert failed.value.reason is Reason.OVERLOADED
        assert it.gateway.idle()


@pytest.mark.timed
async def test_full_everywhere_with_no_hope_is_said_at_once() -> None:
    async with cluster(2, max_wait=15.0) as it:
        for worker in it.workers:
            worker.refusal = refusal(pb.REASON_OVERLOADED, seconds=60.0)
        before = time.monotonic()
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation())
        assert time.monotonic() - before < 15
        assert failed.value.reason is Reason.OVERLOADED
        assert failed.value.retryable
        assert 40 < failed.value.retry_after <= 60
        assert it.submits() == 2


@pytest.mark.timed
async def test_a_draining_worker_is_waited_for_without_a_storm() -> None:
    async with cluster(1) as it:
        it.workers[0].refusal = refusal(pb.REASON_NOT_READY, seconds=0.2)
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=3)))
        await until(lambda: len(it.workers[0].submits) == 3)
        it.workers[0].refusal = None
        await task
        assert len(it.workers[0].submits) == 4


@pytest.mark.parametrize("reason", [pb.REASON_BAD_REQUEST, pb.REASON_KV_EXHAUSTED])
async def test_a_wrong_request_fails_at_once_and_harms_nobody(reason: int) -> None:
    async with cluster(2) as it:
        for worker in it.workers:
            worker.refusal = pb.Error(reason=reason, message="too long by 3 tokens")
        for _ in range(20):
            with pytest.raises(GenerationError, match="too long by 3 tokens") as failed:
                await consume(it.gateway, generation())
            assert not failed.value.retryable
        assert it.submits() == 20
        assert not any(view.on_trial for view in it.gateway.workers())


async def test_requests_wait_for_a_worker_in_a_bounded_queue() -> None:
    async with cluster(1, max_waiting=3) as it:
        (worker,) = it.workers
        worker.become(pb.STATE_LOADING)
        await until(lambda: not it.gateway.ready())
        tasks = [asyncio.create_task(consume(it.gateway, generation(seed=seed))) for seed in range(3)]
        await until(lambda: it.gateway.metric("streams_waiting") == 3)
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation())
        assert failed.value.reason is Reason.OVERLOADED
        assert failed.value.retry_after > 0
        tasks[0].cancel()
        await until(lambda: it.gateway.metric("streams_waiting") == 2)
        worker.become(pb.STATE_READY)
        for seed in (1, 2):
            assert tuple((await tasks[seed]).tokens) == undisturbed((5, 6, 7), seed, 20)
        assert it.gateway.idle()


async def test_streams_that_lost_their_worker_may_always_wait() -> None:
    async with cluster(1, Plan(rate=50, restart_seconds=0.3), max_waiting=0) as it:
        begun = await begin(it, 4)
        await it.workers[0].die()
        await finish(begun)
