"""Generations on workers in this process: what consumers see while workers fail in every way."""

import asyncio
import contextlib
import random
import time

import pytest
import structlog

from moebius_gateway.types import FinishReason, GenerationError, Reason
from tests.gateway.dispatching import SLOW, Cluster, begin, cluster, consume, finish, gateway, generation
from tests.gateway.worker_standin import Plan, StandIn, serving, undisturbed
from tests.waiting import until

KILLER = 300


async def test_a_generation_undisturbed() -> None:
    async with cluster(1) as it:
        seen = await consume(it.gateway, generation(max_tokens=20, logprobs=0))
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), 1, 20)
        assert seen.finish_reason is FinishReason.LENGTH
        assert seen.pieces[0].cached_tokens == 1
        assert sum(piece.cached_tokens for piece in seen.pieces) == 1
        logprobs = [one.logprob for piece in seen.pieces for one in piece.logprobs]
        assert logprobs == pytest.approx([-token / 100 for token in seen.tokens])
        assert it.gateway.idle()


async def test_a_stop_token_is_the_last() -> None:
    async with cluster(1) as it:
        stop = undisturbed((5, 6, 7), 1, 20)[8]
        seen = await consume(it.gateway, generation(max_tokens=20, stop=[stop]))
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), 1, 20, stop=[stop])
        assert seen.finish_reason is FinishReason.STOP


async def test_requests_spread_over_workers() -> None:
    async with cluster(2, SLOW) as it:
        begun = await begin(it, 8, at_least=1)
        assert [len(worker.running) for worker in it.workers] == [4, 4]
        await finish(begun)


async def test_a_shared_prefix_is_sent_to_one_worker_until_that_is_busy() -> None:
    async with cluster(2, SLOW) as it:
        prompt = tuple(range(3, 203))
        for seed in range(4):
            await consume(it.gateway, generation((*prompt, seed), max_tokens=2))
        assert sorted(len(worker.submits) for worker in it.workers) == [0, 4]


async def test_engine_death_with_a_second_worker() -> None:
    async with cluster(2, SLOW) as it:
        begun = await begin(it, 8)
        await it.workers[0].die()
        await finish(begun)
        assert it.gateway.metric("migrations_total", reason="ENGINE_DEAD", outcome="resumed") == 4
        assert it.gateway.metric("strikes_total") == 4
        assert it.gateway.idle()


@pytest.mark.timed
async def test_engine_death_with_one_worker_pauses_the_streams() -> None:
    async with cluster(1, Plan(rate=50, restart_seconds=0.5)) as it:
        begun = await begin(it, 4)
        died = asyncio.create_task(it.workers[0].die())
        await until(lambda: it.gateway.metric("streams_waiting") == 4)
        await finish(begun)
        await died
        assert it.gateway.idle()


async def test_the_death_of_a_whole_worker_before_the_first_token() -> None:
    async with cluster(1, SLOW) as it:
        it.workers[0].paused = True
        second = StandIn(SLOW, name="second")
        task = asyncio.create_task(consume(it.gateway, generation()))
        await until(lambda: it.workers[0].running)
        it.workers[0].restart()
        await until(lambda: len(it.workers[0].submits) == 2)
        it.workers[0].paused = False
        assert tuple((await task).tokens) == undisturbed((5, 6, 7), 1, 20)
        assert not second.submits


async def test_a_lost_stream_with_a_second_worker() -> None:
    async with contextlib.AsyncExitStack() as stack:
        first, second = StandIn(SLOW, "first"), StandIn(SLOW, "second")
        port = await stack.enter_async_context(serving(second))
        async with serving(first) as doomed:
            built = await stack.enter_async_context(gateway(doomed, port))
            await until(lambda: all(view.model for view in built.workers()))
            it = Cluster(built, [first, second], [doomed, port])
            begun = await begin(it, 8)
            assert len(first.running) == 4
        await finish(begun)
        assert built.metric("strikes_total") == 4
        assert built.idle()


@pytest.mark.timed
async def test_a_silent_worker_loses_its_streams_in_time() -> None:
    async with cluster(2, SLOW, silence_timeout=1.0) as it:
        begun = await begin(it, 4)
        # What runs there does not end before the others come.
        it.workers[1].paused = True
        it.workers[0].silent = True
        silent_since = time.monotonic()
        await until(lambda: len(it.workers[1].running) == 4)
        # By default it would be 5 s.
        assert 0.9 < time.monotonic() - silent_since < 4.0
        it.workers[1].paused = False
        await finish(begun)
        assert it.gateway.idle()


async def test_only_what_was_in_the_step_gets_a_strike() -> None:
    async with cluster(2, SLOW) as it:
        begun = await begin(it, 4)
        suspect = it.workers[0].running[0].handle
        await it.workers[0].die(suspects=frozenset({suspect}))
        await finish(begun)
        assert it.gateway.metric("strikes_total") == 1
        assert it.gateway.metric("migrations_total", reason="ENGINE_DEAD", outcome="resumed") == 2


@pytest.mark.parametrize("workers", [1, 2])
async def test_poison_is_isolated_and_its_neighbours_finish(workers: int) -> None:
    plan = Plan(rate=50, killers=frozenset({KILLER}))
    async with cluster(workers, plan) as it:
        begun = await begin(it, 8)
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation((5, KILLER)))
        assert failed.value.reason is Reason.POISONED
        assert not failed.value.retryable
        await finish(begun)
        assert it.gateway.metric("poisoned_total") == 1
        await until(lambda: sum(worker.starts - 1 for worker in it.workers) == 3)
        assert it.gateway.idle()


async def test_innocents_leave_quarantine_with_their_first_token() -> None:
    async with cluster(1, SLOW) as it:
        (worker,) = it.workers
        worker.paused = True
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=10)))
        for count in (1, 2):
            await until(lambda count=count: len(worker.submits) == count and worker.running)
            await worker.die()
        await until(lambda: len(worker.submits) == 3 and worker.running)
        worker.paused = False
        assert tuple((await task).tokens) == undisturbed((5, 6, 7), 1, 10)
        assert [submit.quarantined for submit in worker.submits] == [False, False, True, False]
        assert it.gateway.metric("migrations_total", reason="REJOINED", outcome="resumed") == 1


async def test_random_deaths_change_no_token() -> None:
    chance = random.Random(11)
    async with cluster(3, Plan(rate=100)) as it:
        begun = await begin(it, 24, max_tokens=100, at_least=1)
        while not all(task.done() for _, task in begun):
            worker = chance.choice(it.workers)
            await chance.choice([worker.die, lambda worker=worker: asyncio.sleep(0, worker.restart())])()
            await asyncio.sleep(0.15)
        await finish(begun, max_tokens=100)
        assert it.gateway.idle()


async def test_a_token_that_got_lost_is_found_out() -> None:
    async with cluster(1, Plan(rate=50)) as it:
        with structlog.testing.capture_logs() as logs:
            [(_, task)] = await begin(it, 1)
            await it.workers[0].die()
            await until(lambda: it.workers[0].running)
            errors = [line for line in logs if line["log_level"] == "error"]
            assert not errors, "nothing is lost in an ordinary death"
            [one] = it.workers[0].running
            one.generated += 1  # as if a delta had been sent that never came
            await it.workers[0].die()
            await task
        [error] = [line for line in logs if line["log_level"] == "error"]
        assert error["sent"] == error["delivered"] + 1
