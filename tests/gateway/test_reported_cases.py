"""Faults that users of other engines reported, where no test beside the code itself has them."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub
from tests.bench.rig import gateway as gateway_process
from tests.bench.rig import simulated
from tests.gateway.http_server import MODEL, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = "x" * (2 * MODEL.max_model_len)
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
}


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
        simulated(*size, "--sim.itl", "0.05", "--sim.answer-tokens", "40") as workers,
        gateway_process(workers) as running,
        grpc.aio.insecure_channel(workers[0]) as channel,
        httpx.AsyncClient(base_url=f"http://{running.host}:{running.port}", timeout=30) as client,
    ):

        async def chat(seed: int) -> int:
            body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "seed": seed}
            return (await client.post("/v1/chat/completions", json=body)).status_code

        asked = [asyncio.ensure_future(chat(seed)) for seed in range(8)]
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, (await WorkerStub(channel).GetStatus(pb.GetStatusRequest())).running)
            await asyncio.sleep(0.02)
        assert [one.result() for one in asked] == [200] * 8
        assert most == 8
