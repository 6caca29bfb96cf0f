"""Real pods, real faults: whatever happens, clients see unbroken, unchanged answers."""

import asyncio
import time

import pytest

from tests.cluster.cluster import Cluster, Lives, until
from tests.cluster.conftest import STREAMS, Scenes
from tests.cluster.faults import FAULTS
from tests.cluster.load import Load
from tests.cluster.scenarios import SCENARIOS, Scenario

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timed]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
async def test_streams_outlive(scenario: Scenario, scenes: Scenes) -> None:
    cluster = scenes.cluster
    if any(FAULTS[event.fault].lab for event in scenario.events) and not cluster.lab:
        pytest.skip("needs a lab")
    load = await scenes.with_workers(scenario.workers)
    lives = await asyncio.to_thread(cluster.lives, scenario.changes)
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(STREAMS, stop))
    try:
        struck, seconds = await strike(scenario, cluster, load)
        ready = await recovered(scenario, cluster, lives, struck)
    finally:
        stop.set()
        await running
    gap = load.longest_gap(struck)
    scenes.report.add(
        scenario.name, fault=seconds, next_token=gap, all_ready=ready, streams=len(load.records)
    )
    assert not load.failures()
    assert gap < scenario.max_gap


async def strike(scenario: Scenario, cluster: Cluster, load: Load) -> tuple[float, float]:
    """Brings about the events. When the first came, and how many seconds all took."""
    tasks = []
    first = 0.0
    for event in scenario.events:
        deadline = time.monotonic() + 60
        while load.chunks < event.at_chunk:
            assert time.monotonic() < deadline, "there is no load"
            await asyncio.sleep(0.02)
        first = first or time.monotonic()
        tasks.append(asyncio.create_task(FAULTS[event.fault].act(cluster)))
    await asyncio.gather(*tasks)
    return first, time.monotonic() - first


async def recovered(scenario: Scenario, cluster: Cluster, lives: Lives, struck: float) -> float:
    """Seconds from the fault until all workers are ready, and what must have changed has."""

    def well() -> bool:
        pods = cluster.pods("worker")
        ready = len(pods) == scenario.workers and all(pod.ready and not pod.ending for pod in pods)
        return ready and (scenario.changes == "nothing" or cluster.lives(scenario.changes) != lives)

    await until(well, f"workers are ready again and {scenario.changes} others", 180)
    return time.monotonic() - struck
