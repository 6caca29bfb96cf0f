"""Generations on workers in this process: what consumers see while workers fail in every way."""

import asyncio
import contextlib
import random
import time

import pytest

from moebius_gateway.types import FinishReason, GenerationError, Reason
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import Cluster, Seen, cluster, consume, gateway, generation, until
from tests.gateway.worker_standin import Plan, StandIn, serving, undisturbed

KILLER = 300
SLOW = Plan(rate=50)


def refusal(reason: int, seconds: float = 0.2) -> pb.Error:
    return pb.Error(reason=reason, message="not now", retryable=True, retry_after_ms=int(1000 * seconds))


async def begin(
    it: Cluster, count: int, max_tokens: int = 30, at_least: int = 5
) -> list[tuple[Seen, asyncio.Task[Seen]]]:
    """`count` generations (seeds 0, 1, ...) in tasks, each with `at_least` tokens."""
    begun = []
    for seed in range(count):
        seen = Seen()
        wanted = generation(seed=seed, max_tokens=max_tokens)
        begun.append((seen, asyncio.create_task(consume(it.gateway, wanted, seen))))
    await until(lambda: all(len(seen.tokens) >= at_least for seen, _ in begun))
    return begun


async def finish(begun: list[tuple[Seen, asyncio.Task[Seen]]], max_tokens: int = 30) -> None:
    """All end with exactly the tokens of an undisturbed run."""
    await asyncio.gather(*(task for _, task in begun))
    for seed, (seen, _) in enumerate(begun):
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), seed, max_tokens)
        assert seen.finish_reason is FinishReason.LENGTH


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
        assert it.gateway.metric("recoveries_total", reason="ENGINE_DEAD") == 4
        assert it.gateway.metric("strikes_total") == 4
        assert it.gateway.idle()


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


async def test_a_silent_worker_loses_its_streams_in_time() -> None:
    async with cluster(2, SLOW, silence_timeout=1.0) as it:
        begun = await begin(it, 4, max_tokens=150)
        it.workers[0].silent = True
        silent_since = time.monotonic()
        await until(lambda: len(it.workers[1].running) == 4)
        assert 0.9 < time.monotonic() - silent_since < 2.0
        await finish(begun, max_tokens=150)
        assert it.gateway.idle()


async def test_only_what_was_in_the_step_gets_a_strike() -> None:
    async with cluster(2, SLOW) as it:
        begun = await begin(it, 4)
        suspect = it.workers[0].running[0].handle
        await it.workers[0].die(suspects=frozenset({suspect}))
        await finish(begun)
        assert it.gateway.metric("strikes_total") == 1
        assert it.gateway.metric("recoveries_total", reason="ENGINE_DEAD") == 2


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
        assert sum(worker.starts - 1 for worker in it.workers) == 3
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
        assert it.gateway.metric("recoveries_total", reason="REJOINED") == 1


async def test_backpressure_goes_elsewhere_and_never_strikes_or_ejects() -> None:
    async with cluster(2) as it:
        for reason in (pb.REASON_OVERLOADED, pb.REASON_DRAINING, pb.REASON_NOT_READY):
            it.workers[0].refusal = refusal(reason)
            for seed in range(5):
                seen = await consume(it.gateway, generation(seed=seed, max_tokens=3))
                assert tuple(seen.tokens) == undisturbed((5, 6, 7), seed, 3)
        assert len(it.workers[0].submits) >= 5
        assert it.gateway.metric("strikes_total") == 0
        for port in it.ports:
            assert it.gateway.metric("ejections_total", worker=f"127.0.0.1:{port}") == 0
        it.workers[0].refusal = None
        assert not any(view.on_trial for view in it.gateway.workers())


async def test_full_everywhere_is_said_at_once() -> None:
    async with cluster(2) as it:
        for worker in it.workers:
            worker.refusal = refusal(pb.REASON_OVERLOADED, seconds=5.0)
        before = time.monotonic()
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation())
        assert time.monotonic() - before < 1
        assert failed.value.reason is Reason.OVERLOADED
        assert failed.value.retryable
        assert 4 < failed.value.retry_after <= 5
        assert it.submits() == 2


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


async def test_no_worker_until_the_deadline() -> None:
    async with cluster(1) as it:
        it.workers[0].become(pb.STATE_FAILED)
        await until(lambda: not it.gateway.ready())
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation(seconds=0.3))
        assert failed.value.reason is Reason.NOT_READY
        assert failed.value.retryable
        assert it.gateway.idle()


async def test_a_deadline_in_mid_stream_ends_it_at_the_worker_too() -> None:
    async with cluster(1, SLOW) as it:
        seen = Seen()
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation(max_tokens=1000, seconds=0.4), seen)
        assert failed.value.reason is Reason.NOT_READY
        assert f"after {len(seen.tokens)} tokens" in failed.value.message
        assert 5 < len(seen.tokens) < 30
        await until(lambda: not it.workers[0].running)
        assert it.gateway.idle()


async def test_closing_cancels_at_the_worker() -> None:
    async with cluster(1, SLOW) as it:
        stream = it.gateway.stream(generation(max_tokens=1000))
        await anext(stream)
        await stream.aclose()
        assert it.gateway.idle()
        await until(lambda: it.workers[0].cancels and not it.workers[0].running, seconds=1)


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
        await until(lambda: it.workers[0].cancels and not it.workers[0].running, seconds=1)


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


async def test_a_worker_that_dies_of_everything_is_tried_with_one_at_a_time() -> None:
    async with cluster(2, SLOW) as it:
        bad, _ = it.workers
        bad.paused = True
        view = it.gateway.workers
        for lives in (1, 2):
            tasks = [asyncio.create_task(consume(it.gateway, generation(seed=seed))) for seed in range(4)]
            await until(lambda: bad.running)
            await bad.die()
            await asyncio.gather(*tasks)
            await until(lambda lives=lives: view()[0].incarnation == f"w0-{lives + 1}" and view()[0].model)
            assert view()[0].on_trial is (lives == 2)
        assert it.gateway.metric("ejections_total", worker=f"127.0.0.1:{it.ports[0]}") == 1
        before, all_before = len(bad.submits), it.submits()
        tasks = [asyncio.create_task(consume(it.gateway, generation(seed=seed))) for seed in range(6)]
        await until(lambda: it.submits() == all_before + 6)
        assert len(bad.submits) == before + 1
        bad.paused = False
        await asyncio.gather(*tasks)
        assert not view()[0].on_trial


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


async def test_a_slow_consumer_gets_what_piled_up_at_once() -> None:
    async with cluster(1) as it, contextlib.aclosing(it.gateway.stream(generation(max_tokens=20))) as stream:
        first = await anext(stream)
        await until(lambda: not it.gateway.workers()[0].in_flight)
        rest = await anext(stream)
        assert (*first.token_ids, *rest.token_ids) == undisturbed((5, 6, 7), 1, 20)
        assert rest.finish_reason is FinishReason.LENGTH


async def test_the_deadline_holds_for_a_slow_consumer_too() -> None:
    async with cluster(1) as it:
        stream = it.gateway.stream(generation(max_tokens=1000, seconds=0.3))
        await anext(stream)
        await asyncio.sleep(0.4)
        with pytest.raises(GenerationError, match="deadline passed"):
            await anext(stream)
        assert it.gateway.idle()


async def test_what_was_finished_in_time_may_be_read_late() -> None:
    async with (
        cluster(1) as it,
        contextlib.aclosing(it.gateway.stream(generation(max_tokens=5, seconds=0.3))) as stream,
    ):
        await anext(stream)
        await asyncio.sleep(0.4)
        assert (await anext(stream)).finish_reason is FinishReason.LENGTH
