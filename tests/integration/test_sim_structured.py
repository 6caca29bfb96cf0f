"""Structured output over simulated workers that go wrong in the middle: the client gets the same text."""

import json

import httpx
import jsonschema
import pytest
import pytest_asyncio

from tests.bench.rig import gateway, simulated

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "parts"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
BODY = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Make one."}],
    "seed": 5,
    "max_tokens": 400,
    "response_format": FORMAT,
}
FLAGS = ("--sim.ttft", "0", "--sim.itl", "0.001", "--max-restart-delay", "0.2")


async def answers(faults: list[dict[str, object]], count: int) -> list[str]:
    async with (
        simulated(*FLAGS, "--sim.faults", json.dumps(faults), workers=2) as workers,
        gateway(workers) as running,
        httpx.AsyncClient(base_url=f"http://{running.host}:{running.port}", timeout=60) as client,
    ):
        texts: list[str] = []
        for _ in range(count):
            answer = (await client.post("/v1/chat/completions", json=BODY)).raise_for_status().json()
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "stop"
            texts.append(choice["message"]["content"])
        return texts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed() -> str:
    [text] = await answers([], 1)
    jsonschema.validate(json.loads(text), SCHEMA)
    return text


@pytest.mark.timeout(180)
@pytest.mark.parametrize("action", ["die", "reset", "raise"])
async def test_a_fault_in_the_middle_does_not_show(action: str, undisturbed: str) -> None:
    # Each engine goes wrong within the first answer that it has, or the second.
    faults: list[dict[str, object]] = [{"action": action, "after_tokens": 15}]
    assert await answers(faults, 3) == [undisturbed] * 3
