"""Streams on the wire, request ids, and what a client sees when something breaks."""

import asyncio
import socket
import time
from typing import Any

import httpx
import orjson
import pytest
import structlog

from moebius_gateway.types import FinishReason, GenerationError, Reason, Tokens
from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, events, running_gateway
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
DEAD = GenerationError(Reason.ENGINE_DEAD, "it died", retryable=True, retry_after=3)


async def test_a_stream_on_the_wire(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: gateway.backend.say("ab")
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert [orjson.loads(chunk)["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        for delta, finish in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "a"}, None),
            ({"content": "b"}, None),
            ({}, "stop"),
        ]
    ]


async def test_tokens_that_come_together_are_one_chunk(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: gateway.backend.say("abcdef", piece=3)
    async with gateway.client() as client:
        response = await client.post(
            "/v1/completions", json={"model": MODEL.id, "prompt": "x", "stream": True}
        )
    texts = [orjson.loads(chunk)["choices"][0]["text"] for chunk in events(response.text)[:-1]]
    assert texts == ["abc", "def", ""]


async def test_an_error_before_the_first_token_is_an_http_error(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: [DEAD]
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "engine_dead"


async def test_an_error_after_it_is_the_last_event(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: [*gateway.backend.say("ab", finish=FinishReason.LENGTH)[:1], DEAD]
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"n": 2})
    assert response.status_code == 200
    *chunks, last = map(orjson.loads, events(response.text))
    assert last == {
        "error": {"message": "it died", "type": "server_error", "param": None, "code": "engine_dead"}
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert gateway.backend.running == 0, "the other choice goes on"


async def test_a_bug_is_an_internal_error_before_and_in_a_stream(gateway: Gateway) -> None:
    bug = ZeroDivisionError("secret")
    with structlog.testing.capture_logs() as logs:
        plain, early, late = await _meet(gateway, bug)
    assert sum("exc_info" in line for line in logs) == 3
    assert (plain.status_code, early.status_code, late.status_code) == (500, 500, 200)
    errors = [plain.json(), early.json(), orjson.loads(events(late.text)[-1])]
    assert [error["error"]["code"] for error in errors] == ["internal_error"] * 3
    assert "secret" not in str(errors)
    assert all("x-request-id" in response.headers for response in (plain, early, late))


async def _meet(gateway: Gateway, bug: Exception) -> tuple[httpx.Response, ...]:
    """Without stream, before a stream's first token, and after it."""
    async with gateway.client() as client:
        gateway.backend.script = lambda _: [bug]
        plain = await client.post("/v1/chat/completions", json=CHAT | {"stream": False})
        early = await client.post("/v1/chat/completions", json=CHAT)
        gateway.backend.script = lambda _: [*gateway.backend.say("ab")[:1], bug]
        return plain, early, await client.post("/v1/chat/completions", json=CHAT)


@pytest.mark.timed
async def test_silence_is_filled_with_comments(gateway: Gateway) -> None:
    """After an interval the headers go out though there is no token; then errors are events."""
    go = asyncio.Event()
    gateway.backend.script = lambda _: [go, DEAD]
    async with (
        gateway.client() as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        assert response.status_code == 200
        received = ""
        async for text in response.aiter_text():
            received += text
            if received.count(": keep-alive\n\n") == 2:
                go.set()
    assert not received.removeprefix(": keep-alive\n\n" * 2).startswith(":")
    [error] = map(orjson.loads, events(received.replace(": keep-alive\n\n", "")))
    assert error["error"]["code"] == "engine_dead"


@pytest.mark.timed
async def test_a_stream_that_talks_gets_no_comments(gateway: Gateway) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert "keep-alive" not in response.text


@pytest.mark.parametrize("given", ["my-id_1.2:3/4+5=", "x" * 128])
async def test_a_request_id_comes_back(gateway: Gateway, given: str) -> None:
    async with gateway.client() as client:
        for body in (CHAT, CHAT | {"stream": False}, CHAT | {"n": 0}, CHAT | {"model": "none"}):
            response = await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": given})
            assert response.headers["x-request-id"] == given
    assert {generation.request_id for generation in gateway.backend.generations} == {given}


@pytest.mark.parametrize("given", [None, "", "x" * 129, "white space", "ünï".encode()])
async def test_without_a_usable_one_it_is_made(gateway: Gateway, given: Any) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    async with gateway.client() as client:
        ids = [(await client.get("/livez", headers=headers)).headers["x-request-id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert all(made.startswith("req-") for made in ids)


async def test_the_deadline_is_the_clients_or_the_settings(gateway: Gateway) -> None:
    async with gateway.client() as client:
        before = time.monotonic()
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Timeout": "2.5"})
        after = time.monotonic()
    default, own = (generation.deadline for generation in gateway.backend.generations)
    assert before + 600 <= default <= after + 600
    assert before + 2.5 <= own <= after + 2.5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("said", [True, False])
async def test_a_client_that_leaves_ends_its_generation(gateway: Gateway, stream: bool, said: bool) -> None:
    never = asyncio.Event()
    first = gateway.backend.say("ab")[:1] if said else []
    gateway.backend.script = lambda _: [*first, never]
    disconnects = gateway.metric("moebius_gateway_client_disconnects_total")
    reader, writer = await asyncio.open_connection(*gateway.address)
    body = orjson.dumps(CHAT | {"stream": stream, "n": 2})
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + head.encode() + body)
    await until(lambda: gateway.backend.running == 2)
    if stream and said:
        await reader.readuntil(b"data: ")
    assert gateway.metric("moebius_gateway_requests_in_flight") == 1
    assert gateway.metric("moebius_gateway_generations_in_flight") == 2
    writer.close()
    await until(lambda: gateway.backend.running == 0)
    await until(lambda: gateway.metric("moebius_gateway_requests_in_flight") == 0)
    assert gateway.metric("moebius_gateway_generations_in_flight") == 0
    assert gateway.metric("moebius_gateway_client_disconnects_total") == disconnects + 1


async def test_a_connection_is_used_again_after_a_stream(gateway: Gateway) -> None:
    sockets = []
    async with gateway.client() as client:
        for stream in (True, False) * 3:
            response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert response.status_code == 200
            sockets.append(response.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(sockets) == 6
    assert len(set(sockets)) == 1


async def test_draining_finishes_what_runs_and_admits_nothing() -> None:
    backend, go = ScriptedBackend(), asyncio.Event()
    async with running_gateway(backend) as gateway, gateway.client() as client:
        backend.script = lambda _: [*backend.say("ab")[:1], go, *backend.say("b")]
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: backend.running == 1)
        drained = asyncio.create_task(gateway.lifecycle.drain(30))
        await until(lambda: gateway.lifecycle.draining)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["the gateway is stopping"])
        assert (await client.get("/livez")).status_code == 200
        assert not drained.done()
        go.set()
        assert events((await running).text)[-1] == "[DONE]"
        assert await drained is True


async def test_what_outlasts_the_grace_is_cut_off_with_an_error() -> None:
    backend = ScriptedBackend()
    async with running_gateway(backend) as gateway, gateway.client() as client:
        backend.script = lambda _: [*backend.say("ab")[:1], asyncio.Event()]
        stream = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": False}))
        await until(lambda: backend.running == 2)
        assert await gateway.lifecycle.drain(0.05) is False
        assert orjson.loads(events((await stream).text)[-1])["error"]["code"] == "draining"
        assert (await plain).status_code == 503
        assert backend.running == 0


async def test_a_slow_client_loses_nothing(gateway: Gateway) -> None:
    """More than the buffers on the way hold, read late."""
    text = "x" * 200
    steps = gateway.backend.say(text, piece=200, finish=FinishReason.LENGTH)
    [piece] = [step for step in steps if isinstance(step, Tokens)]
    more = Tokens(piece.token_ids)
    gateway.backend.script = lambda _: [*[more] * 3000, piece]
    body = {"model": MODEL.id, "prompt": "x", "stream": True}
    async with (
        gateway.client() as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await asyncio.sleep(0.5)
        received = "".join([part async for part in response.aiter_text()])
    chunks = [orjson.loads(event) for event in events(received)[:-1]]
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == 3001 * 200


@pytest.mark.timed
async def test_the_deadline_holds_for_a_client_that_does_not_read(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: [Tokens((5,))] * 30_000
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(gateway.address)
        # More than all buffers on the way hold: with the alternatives a token is more than a kilobyte.
        body = orjson.dumps(CHAT | {"logprobs": True, "top_logprobs": 20})
        # On a slow machine too little comes in time to fill the buffers: then it is told why, and ends well.
        head = "Host: x\r\nConnection: close\r\nContent-Type: application/json\r\nX-Request-Timeout: 0.5\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head.encode() + body)
        await until(lambda: gateway.backend.running == 1)
        await until(lambda: gateway.backend.running == 0)
        await until(lambda: gateway.metric("moebius_gateway_requests_in_flight") == 0)
        received = await asyncio.to_thread(_all_of, client)
    assert b"data: " in received
    assert not received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


def _all_of(client: socket.socket) -> bytes:
    """What comes until the other side closes the connection."""
    client.settimeout(PATIENCE)
    return b"".join(iter(lambda: client.recv(1 << 20), b""))
