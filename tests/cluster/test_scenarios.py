"""Real pods, real faults: whatever happens, clients see unbroken, unchanged answers."""

import asyncio
import time

import pytest

from tests.cluster.cluster import Cluster, Pod
from tests.cluster.conftest import STREAMS, Scenes
from tests.cluster.faults import FAULTS, all_ready
from tests.cluster.load import Load
from tests.cluster.scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
async def test_streams_outlive(scenario: Scenario, scenes: Scenes) -> None:
    cluster = scenes.cluster
    if any(FAULTS[event.fault].lab for event in scenario.events) and not cluster.lab:
        pytest.skip("needs a lab")
    load = await scenes.with_workers(scenario.workers)
    before = await all_ready(cluster)
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(STREAMS, stop))
    try:
        struck, seconds = await strike(scenario, cluster, load)
        after, ready = await recovered(scenario, cluster, before, struck)
    finally:
        stop.set()
        await running
    gap = load.longest_gap(struck)
    scenes.report.add(
        scenario.name, fault=seconds, next_token=gap, all_ready=ready, streams=len(load.records)
    )
    assert not load.failures()
    assert gap < scenario.max_gap
    if scenario.new_pods:
        assert {pod.uid for pod in before} != {pod.uid for pod in after}


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


async def recovered(
    scenario: Scenario, cluster: Cluster, before: list[Pod], struck: float
) -> tuple[list[Pod], float]:
    """The workers once all are ready again and what must have changed has, and seconds since the fault."""

    def changed(pods: list[Pod]) -> bool:
        if {pod.uid for pod in before} != {pod.uid for pod in pods}:
            return True  # whoever replaced it: a controller may be faster than a kubelet that waits
        restarts = sum(pod.restarts for pod in pods) - sum(pod.restarts for pod in before)
        return not scenario.new_pods and (restarts > 0 or not scenario.restarts)

    while True:
        pods = await all_ready(cluster)
        if changed(pods) and len(pods) == scenario.workers:
            return pods, time.monotonic() - struck
        assert time.monotonic() - struck < 120, f"nothing has changed: {pods}"
        await asyncio.sleep(0.2)
