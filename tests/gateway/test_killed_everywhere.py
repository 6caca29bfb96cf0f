"""A worker dies at every token of an answer: what the client gets is what it gets undisturbed.

The whole gateway over two workers that say a given answer, a byte a token, so that every character, marker
and stop string is cut everywhere. Each request is killed once, at an index of its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client import CollectorRegistry

from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.app import build_app, build_services
from moebius_gateway.http_protocol import bounded
from moebius_gateway.server import Server
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.text.model import TextModel
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.api.chatty import SCHEMA, chatty_files, tools
from tests.gateway.http_server import events
from tests.gateway.worker_standin import Plan, Running, StandIn, serving
from tests.ports import free_port
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE
from tests.waiting import until

FILES = chatty_files()
TEXT = TextModel(FILES)
PLAN = Plan(rate=400, tokenizer=tuple(FILES.items()), max_running=500)
# In a request's id: the index of the token instead of which it dies; NEVER: undisturbed.
NEVER = 10_000


def byte_tokens(text: str) -> tuple[int, ...]:
    spelling = TEXT.token_bytes.spelling
    by_byte = {spelling(i): i for i in reversed(range(VOCAB_SIZE))}
    return (*(by_byte[bytes([byte])] for byte in text.encode()), EOS_TOKEN_ID)


@dataclass(eq=False)
class Script:
    """What both workers say, and what they were asked."""

    answer: tuple[int, ...] = ()
    killed: set[tuple[str, int]] = field(default_factory=set)
    # By request and seed: the first word about it.
    first: dict[tuple[str, int], pb.Submit] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Speaker(StandIn):
    def __init__(self, script: Script, name: str) -> None:
        super().__init__(PLAN, name)
        self.script = script

    async def _compute(self, batch: Sequence[Running]) -> None:
        self.step += 1
        for one in batch:
            frame = pb.WorkerFrame()
            key = one.submit.request_id, one.submit.sampling.seed
            if one.generated >= int(one.submit.request_id) and key not in self.script.killed:
                self.script.killed.add(key)
                del one.stream.running[one.handle]
                error = pb.Error(reason=pb.REASON_ENGINE_DEAD, message="killed", retryable=True, in_step=True)
                error.tokens_sent = one.generated
                frame.failures.add(handle=one.handle, error=error)
            else:
                frame.deltas.append(self._advance(one))
            one.stream.outbox.put_nowait(frame)

    def _advance(self, one: Running) -> pb.Delta:
        self._check(one)
        index = one.generated
        token = self.script.answer[index]
        one.generated += 1
        delta = pb.Delta(handle=one.handle, token_ids=[token])
        if index == one.submit.resumed:
            delta.cached_tokens = 3
        if one.submit.sampling.HasField("logprobs"):
            delta.logprobs.add(logprob=-index / 8, top_token_ids=[token, 7], top_logprobs=[-index / 8, -9.0])
        ends = token in one.submit.stop_token_ids and one.generated > one.submit.min_tokens
        # One that dies after its last token does so before it can say that it was the last.
        if ends and int(one.submit.request_id) != one.generated:
            delta.finish_reason = pb.FINISH_REASON_STOP
        elif one.generated >= one.submit.max_tokens:
            delta.finish_reason = pb.FINISH_REASON_LENGTH
        if delta.finish_reason:
            del one.stream.running[one.handle]
        return delta

    def _check(self, one: Running) -> None:
        """Each attempt asks for the same, from where the one before it ended."""
        submit = one.submit
        first = self.script.first.setdefault((submit.request_id, submit.sampling.seed), submit)
        prompt = len(submit.token_ids) - submit.resumed
        said = list(submit.token_ids[prompt:])
        if said != list(self.script.answer[: submit.resumed]):
            self.script.faults.append(f"{submit.request_id}: resumed with {said}")
        for name in ("sampling", "max_tokens", "min_tokens", "stop_token_ids", "grammar", "priority"):
            if getattr(submit, name) != getattr(first, name):
                self.script.faults.append(f"{submit.request_id}: another {name}")
        if list(submit.token_ids[:prompt]) != list(first.token_ids):
            self.script.faults.append(f"{submit.request_id}: another prompt")


@dataclass
class Stage:
    url: str
    script: Script
    dispatcher: Dispatcher
    registry: CollectorRegistry


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    script = Script()
    async with contextlib.AsyncExitStack() as stack:
        speakers = [Speaker(script, f"w{i}") for i in range(2)]
        ports = [await stack.enter_async_context(serving(speaker)) for speaker in speakers]
        registry, lifecycle, settings = CollectorRegistry(), Lifecycle(), GatewaySettings(max_waiting=10_000)
        options = DispatcherOptions(workers=tuple(f"127.0.0.1:{port}" for port in ports))
        dispatcher = Dispatcher(options, DispatcherMetrics(registry))
        app = build_app(build_services(settings, dispatcher, lifecycle, registry))
        server = Server(app, bounded(10_000, 100), lifespan=True)
        port = free_port()
        server.config.port = port
        serving_task = asyncio.create_task(server.serve())
        try:
            await until(lambda: len(dispatcher.ready_workers("standin")) == 2)
            yield Stage(f"http://127.0.0.1:{port}", script, dispatcher, registry)
        finally:
            server.should_exit = True
            await serving_task


async def answer(client: httpx.AsyncClient, path: str, body: dict[str, Any], index: int) -> Any:
    """The whole answer, streamed or not, without what differs from one request to the next."""
    response = await client.post(path, json=body, headers={"X-Request-Id": str(index)})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return plain(response.json())
    assert events(response.text)[-1] == "[DONE]"
    return folded([orjson.loads(event) for event in events(response.text)[:-1]])


def plain(whole: dict[str, Any]) -> Any:
    for choice in whole["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            del call["id"]
    return whole["choices"], whole["usage"]


def folded(chunks: list[dict[str, Any]]) -> Any:
    """What a client puts together of a stream: by choice, texts joined and lists in a row."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            made = choices.setdefault(choice["index"], {})
            assert "finish_reason" not in made, "something came after the end"
            _fold(made, choice.get("delta") or {"text": choice.get("text", "")})
            for name, values in (choice.get("logprobs") or {}).items():
                made.setdefault(f"{name} of tokens", []).extend(values or [])
            if choice["finish_reason"]:
                made["finish_reason"] = choice["finish_reason"]
    return choices, [chunk["usage"] for chunk in chunks if chunk.get("usage")]


def _fold(made: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value:
                calls = made.setdefault("calls", {}).setdefault(call["index"], {"name": "", "arguments": ""})
                for part, text in call["function"].items():
                    calls[part] += text or ""
        elif isinstance(value, str) and name != "role":
            made[name] = made.get(name, "") + value


ASK = {"model": "standin", "messages": [{"role": "user", "content": "Hi"}], "seed": 5}
COMPLETE = {"model": "standin", "prompt": "Hi", "seed": 5}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CALL = '<tool_call>{"name":"weather","arguments":{"city":"ö🙂"}}</tool_call>'
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "reasoning and a call": (
        "/v1/chat/completions",
        ASK | STREAM | {"tools": tools()},
        f"<think>Hm🙂</think>{CALL}",
    ),
    "two calls in one piece": ("/v1/chat/completions", ASK | {"tools": tools()}, f"{CALL}\n{CALL}"),
    "logprobs, penalties, a seed": (
        "/v1/completions",
        COMPLETE | STREAM | PENALTIES | {"logprobs": 2, "max_tokens": 40, "temperature": 0.7},
        "The quick brown fox jumps over the lazy dog. 🙂",
    ),
    "chat with logprobs": (
        "/v1/chat/completions",
        ASK | STREAM | {"logprobs": True, "top_logprobs": 2},
        "Ja, schön 🙂 日本!",
    ),
    "three choices": ("/v1/completions", COMPLETE | STREAM | {"n": 3}, "Schöne 🙂 Grüße"),
    "a stop string that nearly comes, then comes": (
        "/v1/completions",
        COMPLETE | STREAM | {"stop": ["STOPP", "日本"], "logprobs": 1},
        "Do ST STO STOP it, 日! now STOPP and more",
    ),
    "a stop string that must not be seen yet": (
        "/v1/completions",
        COMPLETE | STREAM | {"stop": ["ab"], "min_tokens": 9},
        "ababababab ab",
    ),
    "halves of characters": ("/v1/chat/completions", ASK | STREAM, "👩‍👩‍👧 こんにちは 你好"),
    "a structured answer": (
        "/v1/chat/completions",
        ASK
        | STREAM
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        '{"city": "Köln", "days": 3}',
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_whole_answer_is_the_undisturbed_one(case: str) -> None:
    path, body, text = CASES[case]
    limits = httpx.Limits(max_connections=None)
    async with stage() as it, httpx.AsyncClient(base_url=it.url, timeout=60, limits=limits) as client:
        it.script.answer = byte_tokens(text)
        expected = await answer(client, path, body, NEVER)
        # Not only equal, but right: all that was said is there.
        assert "\ufffd" not in str(expected)
        assert expected[1], "usage"
        indices = range(len(it.script.answer) + 1)
        got = await asyncio.gather(*(answer(client, path, body, index) for index in indices))
        for index, one in zip(indices, got, strict=True):
            assert one == expected, f"killed at {index}"
        assert not it.script.faults
        # Each one was killed indeed, but for those that had ended before.
        assert len(it.script.killed) >= body.get("n", 1) * (len(it.script.answer) // 2)
        recovered = it.registry.get_sample_value(
            "moebius_gateway_migrations_total", {"reason": "ENGINE_DEAD", "outcome": "resumed"}
        )
        assert (recovered or 0) >= len(it.script.killed) // 2
        assert not any(view.in_flight for view in it.dispatcher.workers())
