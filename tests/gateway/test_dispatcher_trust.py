"""Which workers the dispatcher counts on: those that are ready, and with care those that keep dying."""

import asyncio
import contextlib

import pytest

from moebius_gateway.types import GenerationError
from moebius_gateway.workers.health import TRIAL_LOSSES
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import SLOW, cluster, consume, gateway, generation, refusal
from tests.gateway.worker_standin import Plan, StandIn, serving
from tests.waiting import until


async def test_ready_is_what_can_be_placed() -> None:
    """In a rollout the name belongs to the model that was known first until nobody serves that."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [StandIn(Plan(tokenizer_hash=name), name) for name in ("old", "new")]
        ports = [await stack.enter_async_context(serving(worker)) for worker in workers]
        built = await stack.enter_async_context(gateway(*ports))
        await until(lambda: all(view.model for view in built.workers()))
        known = built.model("standin")
        assert known is not None
        [first] = [worker for worker in workers if worker.plan.tokenizer_hash == known.tokenizer_hash]
        assert built.ready("standin")
        assert built.ready()
        first.become(pb.STATE_DRAINING)
        await until(lambda: built.metric("workers", state="DRAINING") == 1)
        assert built.metric("workers", state="READY") == 1
        assert not built.ready("standin")
        assert not built.ready()
        with pytest.raises(GenerationError):
            await consume(built, generation(seconds=0.1))


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


@pytest.mark.parametrize(
    ("how", "on_trial"), [("killed", True), ("drained", False), ("refused", False), ("cancelled", False)]
)
async def test_only_a_worker_that_died_under_requests_is_tried_with_care(how: str, on_trial: bool) -> None:
    async with cluster(1) as it:
        (worker,) = it.workers
        worker.paused = True

        def reconnects() -> float:
            return it.gateway.metric("attach_reconnects_total", worker=f"127.0.0.1:{it.ports[0]}")

        for lost in range(TRIAL_LOSSES):
            await until(it.gateway.ready)
            worker.refusal = refusal(pb.REASON_OVERLOADED) if how == "refused" else None
            seconds = 1.0 if how == "refused" else 20.0
            task = asyncio.create_task(consume(it.gateway, generation(seed=lost, seconds=seconds)))
            await until(lambda lost=lost: any(submit.sampling.seed == lost for submit in worker.submits))
            if how == "cancelled":
                task.cancel()
                await until(lambda: not worker.running)
            if how == "refused":
                await asyncio.wait([task])
            if how == "drained":
                worker.become(pb.STATE_DRAINING)
                await until(lambda: not it.gateway.ready())
            worker.state = pb.STATE_READY
            worker.hang_up()
            # The request is given up only afterwards: it must be there when the stream ends.
            await until(lambda lost=lost: reconnects() == lost + 1)
            task.cancel()
            await asyncio.wait([task])
        assert it.gateway.workers()[0].on_trial is on_trial
