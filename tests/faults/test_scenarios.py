"""Real processes, real signals: whatever dies, each of 16 clients sees one unbroken, unchanged answer."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.load import stream, sure_prompts
from tests.faults.scenarios import SCENARIOS, STALL_TIMEOUT, Event, Scenario
from tests.stack import Stack, stack, until

STREAMS = 16


async def busiest(running: Stack) -> dict[str, Any]:
    workers = (await running.status())["workers"]
    return max((w for w in workers if w["engine_pid"]), key=lambda w: w["running"])


async def strike(running: Stack, event: Event) -> None:
    worker = await busiest(running)
    assert worker["running"] > 0, f"{event} would hit an idle worker"
    os.kill(worker["engine_pid" if event.target == "engine" else "pid"], event.signal)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
async def test_streams_outlive(scenario: Scenario, checkpoint: Path, tmp_path: Path) -> None:
    env = {"MOEBIUS_WORKER_STALL_TIMEOUT": str(STALL_TIMEOUT)} | scenario.env
    async with (
        stack(checkpoint, tmp_path / "state", workers=scenario.workers, env=env) as running,
        running.client() as client,
    ):
        model = await running.model()
        expected = await sure_prompts(client, model, STREAMS)
        before = await running.status()

        chunks = 0
        pending = list(scenario.events)
        struck: list[asyncio.Task[None]] = []

        def on_chunk() -> None:
            nonlocal chunks
            chunks += 1
            if pending and chunks >= pending[0].at_chunk:
                struck.append(asyncio.create_task(strike(running, pending.pop(0))))

        seen = await asyncio.gather(
            *(stream(client, prompt.body(model), on_chunk) for prompt, _ in expected),
        )
        await asyncio.gather(*struck)
        assert len(struck) == len(scenario.events), "the load ended before the faults came"
        assert [one.answer() for one in seen] == [undisturbed.answer() for _, undisturbed in expected]

        # Everything that was counted up is counted down again, and every worker comes back.
        assert await running.metric("moebius_gateway_requests_in_flight") == 0
        after = await until(lambda: all_ready(running), 60, "all workers are ready again")
        assert after["gateway"]["pid"] == before["gateway"]["pid"], "the gateway was restarted"
        assert sum(worker["running"] + worker["waiting"] for worker in after["workers"]) == 0


async def all_ready(running: Stack) -> dict[str, Any] | None:
    status = await running.status()
    return status if all(worker["state"] == "READY" for worker in status["workers"]) else None
