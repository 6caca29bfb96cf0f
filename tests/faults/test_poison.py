"""Requests that break engines: only they fail, and only when their guilt is certain."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.faults.load import MARKED_TOKEN_ID, Prompt, stream, sure_prompts
from tests.stack import stack

POISON = Prompt((20, 30, MARKED_TOKEN_ID, 40))
NEIGHBOURS = 8


def faults(action: str) -> dict[str, str]:
    return {"MOEBIUS_WORKER_INJECT_FAULTS": json.dumps([{"token_id": MARKED_TOKEN_ID, "action": action}])}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("action", ["kill", "raise"])
async def test_poison_is_isolated(action: str, workers: int, checkpoint: Path, tmp_path: Path) -> None:
    async with (
        stack(checkpoint, tmp_path / "state", workers=workers, env=faults(action)) as running,
        running.client() as client,
    ):
        model = await running.model()
        expected = await sure_prompts(client, model, NEIGHBOURS)
        before = await running.status()

        neighbours = [asyncio.create_task(stream(client, prompt.body(model))) for prompt, _ in expected]
        poisoned = await client.post("/v1/completions", json=POISON.body(model))
        assert poisoned.status_code == 500, poisoned.text
        assert poisoned.json()["error"]["code"] == "poisoned"

        seen = await asyncio.gather(*neighbours)
        assert [one.answer() for one in seen] == [undisturbed.answer() for _, undisturbed in expected]
        assert await running.metric("moebius_gateway_poisoned_total") == 1

        after = await running.status()
        assert after["gateway"]["pid"] == before["gateway"]["pid"]
        if action == "raise":
            # An exception in a step costs the batch, not the engine.
            engines = [worker["engine_pid"] for worker in before["workers"]]
            assert [worker["engine_pid"] for worker in after["workers"]] == engines
