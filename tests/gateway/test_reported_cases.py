"""Faults that users of other engines reported: which test shows each, and those that no other test has."""

import ast
import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub
from tests.bench.rig import gateway as gateway_process
from tests.bench.rig import simulated
from tests.gateway.dispatching import consume, generation
from tests.gateway.dispatching import gateway as dispatcher
from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, running_gateway
from tests.gateway.reported import ELSEWHERE, SHOWN
from tests.gateway.worker_standin import Plan, StandIn, serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
TESTS = Path(__file__).parents[1]
REPORTS = 85
REPRODUCTIONS = 25
LONG = "x" * (2 * MODEL.max_model_len)
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
}


async def test_each_report_is_shown_by_tests_that_there_are() -> None:
    reports = [f"k8s {number}" for number in range(1, REPORTS + 1)]
    reports += [f"T{number}" for number in range(1, REPRODUCTIONS + 1)]
    assert sorted([*SHOWN, *ELSEWHERE]) == sorted(reports)
    named = {test.partition("::")[::2] for tests in SHOWN.values() for test in tests}
    functions = {
        file: {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if _is_function(node)}
        for file in {file for file, _ in named}
    }
    assert {(file, test) for file, test in named if test not in functions[file]} == set()


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", TOO_LONG)
async def test_a_prompt_beyond_the_context_is_a_400_at_once(gateway: Gateway, url: str, stream: bool) -> None:
    async with gateway.client() as client:
        answer = await client.post(url, json=TOO_LONG[url] | {"model": MODEL.id, "stream": stream})
    assert answer.status_code == 400
    assert f"context is {MODEL.max_model_len} tokens" in answer.json()["error"]["message"]
    assert not gateway.backend.generations, "it was queued"


ODD: dict[str, list[dict[str, Any]]] = {
    "a system message in the middle": [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "two system messages": [
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "no text": [{"role": "user", "content": ""}],
    "no parts": [{"role": "user", "content": []}],
    "a part without text": [{"role": "user", "content": [{"type": "text", "text": ""}]}],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("case", ODD)
async def test_odd_conversations_are_answered(gateway: Gateway, url: str, case: str) -> None:
    said = {"input": ODD[case]} if url == "/v1/responses" else {"messages": ODD[case]}
    if url == "/v1/messages":
        said |= {"max_tokens": 9}  # type: ignore[dict-item]
    async with gateway.client() as client:
        answer = await client.post(url, json=said | {"model": MODEL.id})
    assert answer.status_code == 200, answer.text


async def test_a_tools_answer_that_nobody_asked_for_is_no_defect(gateway: Gateway) -> None:
    orphan: dict[str, Any] = {"messages": [{"role": "tool", "tool_call_id": "x", "content": "dry"}]}
    result = {"type": "tool_result", "tool_use_id": "x", "content": "dry"}
    block: dict[str, Any] = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 9}
    item: dict[str, Any] = {"input": [{"type": "function_call_output", "call_id": "x", "output": "dry"}]}
    sent = {"/v1/chat/completions": orphan, "/v1/messages": block, "/v1/responses": item}
    async with gateway.client() as client:
        for url, body in sent.items():
            answer = await client.post(url, json=body | {"model": MODEL.id})
            assert answer.status_code in (200, 400), answer.text


async def test_who_names_no_limit_does_not_reserve_the_whole_cache() -> None:
    """Eight chats without `max_tokens` run together in a cache of 16k tokens, which each could fill alone."""
    size = ("--sim.kv-tokens", "16384", "--max-model-len", "16384", "--sim.ttft", "0.01")
    async with (
        simulated(*size, "--sim.itl", "0.05", "--sim.answer-tokens", "400") as workers,
        gateway_process(workers) as running,
        grpc.aio.insecure_channel(workers[0]) as channel,
        httpx.AsyncClient(base_url=f"http://{running.host}:{running.port}", timeout=30) as client,
    ):

        async def together() -> bool:
            return (await WorkerStub(channel).GetStatus(pb.GetStatusRequest())).running == 8

        body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}]}
        asked = [client.post("/v1/chat/completions", json=body | {"seed": seed}) for seed in range(8)]
        chats = asyncio.gather(*asked)
        await until(together)
        chats.cancel()
        await asyncio.wait([chats])


async def test_what_is_no_worker_at_a_workers_address_harms_nobody() -> None:
    """A web server, say, or one that hangs up, or one that says nothing."""

    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def says_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    servers = [await asyncio.start_server(kind, "127.0.0.1", 0) for kind in (web, hangs_up, says_nothing)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    async with serving(StandIn(Plan())) as port, dispatcher(port, *ports) as built:
        await until(lambda: built.workers()[0].model is not None)
        await until(lambda: all(view.detail != "not attached yet" for view in built.workers()[1:3]))
        assert [view.state.value for view in built.workers()] == ["READY", *["UNREACHABLE"] * 3]
        assert len((await consume(built, generation())).tokens) == 20
    for server in servers:
        server.close()


@pytest.mark.timed
async def test_probes_are_answered_while_a_hundred_streams_run(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: gateway.backend.say("x" * 60)
    body = {"model": MODEL.id, "prompt": [5], "stream": True}
    limits = httpx.Limits(max_connections=150)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, limits=limits) as client:
        streams = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(100)]
        await until(lambda: gateway.backend.running > 50)
        begun, turns = time.monotonic(), 0
        async with gateway.client() as prober:
            while gateway.backend.running > 50:
                assert (await prober.get("/readyz")).status_code == 200
                turns += 1
        # Client and server share one event loop here: a probe waits for as many others as there are.
        assert turns >= 3, f"{turns} in {time.monotonic() - begun:.1f} s"
        assert {answer.status_code for answer in await asyncio.gather(*streams)} == {200}


@pytest.mark.timed
async def test_requests_that_no_worker_is_there_for_are_seen() -> None:
    """By whoever scales from zero: while they wait, and when they are given up."""
    backend = ScriptedBackend(is_ready=False)
    async with running_gateway(backend) as running, running.client() as client:
        await until(lambda: running.services.texts.loaded(MODEL))
        body = {"model": MODEL.id, "prompt": [5]}
        asked = asyncio.create_task(
            client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.5"})
        )
        await until(lambda: running.metric("moebius_gateway_admission_waiting") == 1)
        assert (await asked).status_code == 503
        assert running.metric("moebius_gateway_requests_total", code="503", route="/v1/completions") == 1
        assert running.metric("moebius_gateway_admission_waiting") == 0


async def test_what_is_counted_before_is_what_is_used(gateway: Gateway) -> None:
    body = {"model": MODEL.id, "messages": [{"role": "user", "content": "Hi 🙂"}], "system": "Be brief."}
    async with gateway.client() as client:
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
        for stream in (False, True):
            answer = await client.post("/v1/messages", json=body | {"max_tokens": 9, "stream": stream})
            assert f'"input_tokens":{counted}' in answer.text
