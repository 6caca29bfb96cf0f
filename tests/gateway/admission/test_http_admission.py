"""Admission as clients meet it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from moebius_gateway.admission.gate import LOOK_SECONDS
from moebius_gateway.types import Generation
from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, Step, events, running_gateway
from tests.waiting import until

BODY: dict[str, Any] = {"model": MODEL.id, "prompt": [5, 6, 7]}


@asynccontextmanager
async def small(**settings: Any) -> AsyncIterator[tuple[Gateway, asyncio.Event]]:
    """One place (and one ahead); sequences end when the event says so."""
    may_end = asyncio.Event()
    backend = ScriptedBackend(max_running=1)

    def script(_: Generation) -> list[Step]:
        first, *rest = backend.say("Hello")
        return [first, may_end, *rest]

    backend.script = script
    async with running_gateway(backend, **settings) as gateway:
        yield gateway, may_end
        may_end.set()


def waiting(gateway: Gateway) -> float:
    return gateway.metric("moebius_gateway_admission_waiting")


async def post(gateway: Gateway, **more: Any) -> httpx.Response:
    async with gateway.client() as client:
        return await client.post("/v1/completions", json=BODY | more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_full_queue_is_a_429_before_the_first_byte(stream: bool, path: str) -> None:
    async with small(max_waiting=1) as (gateway, may_end):
        tasks = [asyncio.create_task(post(gateway, stream=stream)) for _ in range(3)]
        await until(lambda: gateway.backend.running == 2 and waiting(gateway) == 1)
        message = {"role": "user", "content": "Hi"}
        chat = {"model": MODEL.id, "max_tokens": 5, "messages": [message], "stream": stream}
        async with gateway.client() as client:
            answer = await client.post(
                path, json=chat if path == "/v1/messages" else BODY | {"stream": stream}
            )
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        may_end.set()
        assert [task.status_code for task in await asyncio.gather(*tasks)] == [200] * 3


@pytest.mark.timed
async def test_a_stream_that_waits_is_kept_alive_and_then_comes() -> None:
    async with small(keep_alive_interval=0.05) as (gateway, may_end):
        tasks = [asyncio.create_task(post(gateway, stream=True)) for _ in range(3)]
        await until(lambda: waiting(gateway) == 1)
        await asyncio.sleep(0.15)
        may_end.set()
        for answer in await asyncio.gather(*tasks):
            assert ": keep-alive" in answer.text
            assert events(answer.text)[-1] == "[DONE]"


async def test_the_choices_of_a_request_take_a_place_each() -> None:
    async with small() as (gateway, may_end):
        task = asyncio.create_task(post(gateway, n=4))
        await until(lambda: gateway.backend.running == 2 and waiting(gateway) == 2)
        may_end.set()
        assert len((await task).json()["choices"]) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_is_forgotten(stream: bool) -> None:
    async with small() as (gateway, may_end):
        tasks = [asyncio.create_task(post(gateway)) for _ in range(2)]
        await until(lambda: gateway.backend.running == 2)
        leaving = asyncio.create_task(post(gateway, stream=stream))
        await until(lambda: waiting(gateway) == 1)
        leaving.cancel()
        await until(lambda: waiting(gateway) == 0)
        may_end.set()
        await asyncio.gather(*tasks)
        assert len(gateway.backend.generations) == 2


@pytest.mark.timed
async def test_a_deadline_in_the_queue_is_a_429_and_without_workers_a_503() -> None:
    async with small() as (gateway, may_end):
        tasks = [asyncio.create_task(post(gateway)) for _ in range(2)]
        await until(lambda: gateway.backend.running == 2)
        async with gateway.client() as client:
            late = await client.post("/v1/completions", json=BODY, headers={"Timeout": "0.2"})
            assert (late.status_code, late.json()["error"]["code"]) == (429, "overloaded")
            may_end.set()
            await asyncio.gather(*tasks)
            gateway.backend.is_ready = False
            await asyncio.sleep(2 * LOOK_SECONDS)
            none = await client.post("/v1/completions", json=BODY, headers={"Timeout": "0.2"})
            assert (none.status_code, none.json()["error"]["code"]) == (503, "not_ready")
            assert int(none.headers["Retry-After"]) >= 1
            # And recovers by itself.
            asyncio.get_running_loop().call_later(0.1, setattr, gateway.backend, "is_ready", True)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
