"""Requests that break engines: only they fail, and only when their guilt is certain."""

import asyncio

import pytest

from tests.faults.checks import all_ready, gateway_pid
from tests.faults.conftest import Scenes
from tests.faults.load import KILLING_TOKEN_ID, RAISING_TOKEN_ID, Prompt, stream
from tests.timed import same

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180), pytest.mark.timed]
NEIGHBOURS = 8


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("token_id", [KILLING_TOKEN_ID, RAISING_TOKEN_ID], ids=["kill", "raise"])
async def test_poison_is_isolated(token_id: int, workers: int, scenes: Scenes) -> None:
    scene = await scenes.with_workers(workers)
    running = scene.running
    before = await all_ready(running)
    poisoned_before = await running.metric("moebius_gateway_poisoned_total")
    async with running.client() as client:
        others = scene.undisturbed[:NEIGHBOURS]
        neighbours = [asyncio.create_task(stream(client, prompt.body(scene.model))) for prompt, _ in others]
        poison = Prompt((20, 30, token_id, 40))
        poisoned = await client.post("/v1/completions", json=poison.body(scene.model))
        assert poisoned.status_code == 500, poisoned.text
        assert poisoned.json()["error"]["code"] == "poisoned"
        seen = await asyncio.gather(*neighbours)
    same([one.answer() for one in seen], [undisturbed.answer() for _, undisturbed in others])
    same(await running.metric("moebius_gateway_poisoned_total"), poisoned_before + 1)

    after = await all_ready(running)
    same(gateway_pid(after), gateway_pid(before))
    if token_id == RAISING_TOKEN_ID:
        # An exception in a step costs the batch, not the engine.
        engines = [worker.engine_pid for worker in before.workers]
        assert [worker.engine_pid for worker in after.workers] == engines
