"""Real processes, real signals: whatever dies, each of 16 clients sees one unbroken, unchanged answer."""

import asyncio
import os

import pytest

from moebius_cli.view import WorkerView
from tests.faults.checks import all_ready, gateway_pid
from tests.faults.conftest import Scenes
from tests.faults.load import stream
from tests.faults.scenarios import SCENARIOS, Event, Scenario
from tests.timed import same

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180), pytest.mark.timed]
REPLAYED = "moebius_gateway_tokens_replayed_total"


def strike(workers: tuple[WorkerView, ...], event: Event) -> None:
    worker = workers[event.worker]
    os.kill(worker.engine_pid if event.target == "engine" else worker.pid, event.signal)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
async def test_streams_outlive(scenario: Scenario, scenes: Scenes) -> None:
    scene = await scenes.with_workers(scenario.workers)
    running = scene.running
    before = await all_ready(running)
    replayed = await running.metric(REPLAYED)
    chunks = 0
    pending = list(scenario.events)

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if pending and chunks >= pending[0].at_chunk:
            # At once: whoever looks first which worker is busy may come when none is any more.
            strike(before.workers, pending.pop(0))

    async with running.client() as client:
        seen = await asyncio.gather(
            *(stream(client, prompt.body(scene.model), on_chunk) for prompt, _ in scene.undisturbed),
        )
    assert not pending, "the load ended before the faults came"
    assert await running.metric(REPLAYED) > replayed, "no stream was on a worker that was struck"
    same([one.answer() for one in seen], [undisturbed.answer() for _, undisturbed in scene.undisturbed])

    # Everything that was counted up is counted down again, and every worker comes back.
    assert await running.metric("moebius_gateway_requests_in_flight") == 0
    after = await all_ready(running)
    same(gateway_pid(after), gateway_pid(before))
    assert sum(worker.running + worker.waiting for worker in after.workers) == 0
