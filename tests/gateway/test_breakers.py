"""What makes a gateway wary of a worker, what never does, and what a drain moves elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from moebius_gateway.types import GenerationError, Reason
from moebius_gateway.workers.health import TRIAL_LOSSES
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from tests.gateway.dispatching import (
    SLOW,
    Cluster,
    begin,
    cluster,
    consume,
    finish,
    gateway,
    generation,
    refusal,
)
from tests.gateway.worker_standin import Plan, StandIn, undisturbed
from tests.ports import free_port
from tests.waiting import until


def fail_all(worker: StandIn, **error: object) -> None:
    """What runs there fails, and the engine goes on."""
    for stream in worker._streams:
        frame = pb.WorkerFrame()
        for handle in list(stream.running):
            failed = pb.Error(message="why", retryable=True, **error)  # type: ignore[arg-type]
            frame.failures.add(handle=handle, error=failed)
            del stream.running[handle]
        stream.outbox.put_nowait(frame)


async def reset(it: Cluster) -> None:
    it.workers[0].hang_up()


async def stalled(it: Cluster) -> None:
    await it.workers[0].die(reason=pb.REASON_ENGINE_STALLED)


async def device(it: Cluster) -> None:
    await it.workers[0].die(reason=pb.REASON_GPU_FAULT)


async def silence(it: Cluster) -> None:
    it.workers[0].silent = True
    await until(lambda: not it.gateway.ready())
    it.workers[0].silent = False


async def step_raised(it: Cluster) -> None:
    fail_all(it.workers[0], reason=pb.REASON_ENGINE_DEAD, in_step=True)


async def backpressure(it: Cluster) -> None:
    fail_all(it.workers[0], reason=pb.REASON_OVERLOADED)


async def wrong_request(it: Cluster) -> None:
    fail_all(it.workers[0], reason=pb.REASON_BAD_REQUEST)


async def too_large(it: Cluster) -> None:
    fail_all(it.workers[0], reason=pb.REASON_KV_EXHAUSTED)


@pytest.mark.parametrize(
    ("what", "counts"),
    [
        (reset, True),
        (stalled, True),
        (device, True),
        (silence, True),
        (step_raised, True),
        (backpressure, False),
        (wrong_request, False),
        (too_large, False),
    ],
)
async def test_what_counts_against_a_worker(what: Callable[[Cluster], Awaitable[None]], counts: bool) -> None:
    async with cluster(1, Plan(beat=0.05), silence_timeout=0.3) as it:
        (worker,) = it.workers
        address = f"127.0.0.1:{it.ports[0]}"
        worker.paused = True
        for seed in range(TRIAL_LOSSES):
            await until(it.gateway.ready)
            # A new request each time: one of which workers die is itself suspected.
            task = asyncio.create_task(consume(it.gateway, generation(seed=seed)))
            await until(lambda seed=seed: any(one.submit.sampling.seed == seed for one in worker.running))
            before = it.submits()
            await what(it)
            # The gateway knows of it: the request is over, waits, or was sent again.
            await until(
                lambda task=task, before=before: (
                    task.done() or it.submits() > before or it.gateway.metric("streams_waiting")
                )
            )
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: not worker.running)
        await until(it.gateway.ready)
        assert it.gateway.workers()[0].on_trial is counts
        assert it.gateway.metric("worker_on_trial", worker=address) == counts
        assert it.gateway.metric("ejections_total", worker=address) == counts


async def test_a_request_that_kills_every_step_ejects_no_worker() -> None:
    """Its first death is held against the worker, the next ones against itself."""
    async with cluster(1, SLOW) as it:
        (worker,) = it.workers
        worker.paused = True
        task = asyncio.create_task(consume(it.gateway, generation()))
        for _ in range(3):
            await until(lambda: worker.running)
            fail_all(worker, reason=pb.REASON_ENGINE_DEAD, in_step=True)
        with pytest.raises(GenerationError) as error:
            await task
        assert error.value.reason is Reason.POISONED
        assert not it.gateway.workers()[0].on_trial
        worker.paused = False
        seen = await consume(it.gateway, generation(seed=9))
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), 9, 20)


class Internal(StandIn):
    """Ends streams with a status."""

    async def Attach(self, requests, context):  # type: ignore[no-untyped-def, override]  # noqa: N802
        async for frame in super().Attach(requests, context):
            yield frame
        await context.abort(grpc.StatusCode.INTERNAL, "a defect")


async def test_an_internal_error_of_the_stream_moves_its_requests_and_is_told() -> None:
    worker, server, port = Internal(SLOW), grpc.aio.server(), free_port()
    add_WorkerServicer_to_server(worker, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    engine = asyncio.create_task(worker.run())
    async with gateway(port) as built:
        await until(built.ready)
        task = asyncio.create_task(consume(built, generation()))
        await until(lambda: worker.running)
        worker.hang_up()
        await until(lambda: "INTERNAL: a defect" in built.workers()[0].detail)
        assert tuple((await task).tokens) == undisturbed((5, 6, 7), 1, 20)
    engine.cancel()
    await server.stop(None)


async def test_a_drain_s_deadline_moves_what_is_left() -> None:
    async with cluster(2, SLOW) as it:
        begun = await begin(it, 8)
        leaving, staying = it.workers
        moved = {one.submit.sampling.seed for one in leaving.running}
        assert moved
        leaving.become(pb.STATE_DRAINING)
        await asyncio.sleep(0.1)
        assert len(leaving.running) == len(moved), "until then they may finish where they are"
        fail_all(leaving, reason=pb.REASON_DRAINING)
        await finish(begun)
        resumed = [one for one in staying.submits if one.resumed]
        assert {one.sampling.seed for one in resumed} == moved
        assert it.gateway.metric("strikes_total") == 0
        assert it.gateway.metric("migrations_total", reason="DRAINING", outcome="resumed") == len(moved)
        assert not any(view.on_trial for view in it.gateway.workers())


async def test_a_worker_with_the_prefix_that_is_dead_is_tried_once() -> None:
    async with cluster(3, SLOW) as it:
        prompt = tuple(range(3, 203))
        await consume(it.gateway, generation(prompt, max_tokens=2))
        [home] = [worker for worker in it.workers if worker.submits]
        home.paused = True
        task = asyncio.create_task(consume(it.gateway, generation(prompt, seed=2)))
        await until(lambda: home.running)
        fail_all(home, reason=pb.REASON_ENGINE_DEAD, in_step=False)
        seen = await task
        assert tuple(seen.tokens) == undisturbed(prompt, 2, 20)
        assert len(home.submits) == 2
        assert it.submits() == 3


async def test_one_that_refuses_is_not_asked_by_the_next_request_first() -> None:
    """What is told by a refusal is how much room there is: others go elsewhere meanwhile."""
    async with cluster(2, SLOW) as it:
        await consume(it.gateway, generation(max_tokens=1))
        [preferred] = [worker for worker in it.workers if worker.submits]
        preferred.refusal = refusal(pb.REASON_OVERLOADED, seconds=5.0)
        for seed in range(3):
            seen = await consume(it.gateway, generation(seed=seed, max_tokens=2))
            assert tuple(seen.tokens) == undisturbed((5, 6, 7), seed, 2)
