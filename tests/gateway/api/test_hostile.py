"""Requests that are made to hurt: each is answered with one clear line, soon, and holds up nobody else."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moebius_gateway.api.parameter_table import BODIES
from moebius_gateway.api.strict import Strict
from tests.gateway.api.chatty import ASK, MODEL, says, tools
from tests.gateway.http_server import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": ASK}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
UNIQUE = {"type": "array", "uniqueItems": True}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "function": {"name": "weather", "arguments": arguments}}
    return [*ASK, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        # Names were compared each with all before.
        ({"tools": [function(f"f{i}") for i in range(30_000)]}, None, "context"),
        ({"tools": [function("f"), function("f")]}, "tools", "two tools are called 'f'"),
        # Where the fault lies was looked for as long as it took, in ever the same large definition.
        (
            {
                "guided_json": {
                    "$defs": {"wide": WIDE},
                    "properties": {f"p{i}": {"$ref": "#/$defs/wide"} for i in range(300)} | {"z": UNIQUE},
                }
            },
            "guided_json",
            "uniqueItems",
        ),
        # What does not fit is told without rendering it.
        ({"messages": called('{"a": "' + "x y" * 200_000 + '"}')}, None, "context"),
        ({"messages": [{"role": "user", "content": "x", "name": "n" * 500_000}]}, None, "context"),
        ({"tools": [function("f", description="d" * 500_000)]}, None, "context"),
        # A schema in a string is as deep as one without.
        (
            {"guided_json": '{"type": "array", "items": ' * 900 + "{}" + "}" * 900},
            "guided_json",
            "nested deeper",
        ),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "keys must be token ids"),
        ({"guided_regex": "(" * 3000}, "guided_regex", "unclosed group"),
        ({"messages": ["Hi"]}, "messages[0]", "is not an object"),
    ],
)
async def test_is_refused_in_a_line(
    chatty: Gateway, asked: dict[str, Any], param: str | None, words: str
) -> None:
    async with chatty.client() as http:
        response = await http.post("/v1/chat/completions", json=CHAT | asked)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert len(error["message"]) < 600
    assert (error["param"] or "").startswith(param or "")


WRONG: dict[str, dict[str, Any]] = {
    "messages": {"messages": [0] * 500_000},
    "tools": {"tools": [[]] * 500_000},
    "stop_token_ids": {"stop_token_ids": ["x"] * 500_000},
    "logit_bias": {"logit_bias": {str(i): "x" for i in range(100_000)}},
    "metadata": {"metadata": dict.fromkeys(map(str, range(100_000)), 0)},
    "k0": {f"k{i}": 0 for i in range(100_000)},
}


@pytest.mark.timed
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("param", WRONG)
async def test_of_many_faults_the_first_is_told_and_no_other_looked_for(chatty: Gateway, param: str) -> None:
    """They took half a minute and a gigabyte for each megabyte of them."""
    content = json.dumps(CHAT | WRONG[param]).encode()
    async with chatty.client() as http:
        begun = time.process_time()
        headers = {"Content-Type": "application/json"}
        response = await http.post("/v1/chat/completions", content=content, headers=headers)
        assert time.process_time() - begun < 3
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


# What a schema has for documents and for writing.
OF_OTHERS = {"json_schema_input_schema", "serialization"}


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """All that a schema of pydantic's core checks with."""
    if isinstance(schema, dict):
        yield schema
        schema = [part for name, part in schema.items() if name not in OF_OTHERS]
    for part in schema if isinstance(schema, list | tuple) else ():
        yield from _schemas(part)


@pytest.mark.parametrize("body", BODIES.values())
async def test_no_body_has_a_place_for_many_faults(body: type[Strict]) -> None:
    for schema in _schemas(body.__pydantic_core_schema__):
        if schema.get("type") == "list":
            assert schema.get("fail_fast"), schema
        if schema.get("type") == "dict" and schema["values_schema"]["type"] != "any":
            assert schema.get("max_length"), schema


@pytest.mark.parametrize("body", ["[]", '"text"', "1"])
async def test_a_body_that_is_no_object(chatty: Gateway, body: str) -> None:
    async with chatty.client() as http:
        headers = {"Content-Type": "application/json"}
        response = await http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the body is not an object"


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 5000, "NaN", "9" * 5000, "\x00"])
async def test_arguments_in_a_history_may_be_anything(chatty: Gateway, arguments: str) -> None:
    async with chatty.client() as http:
        response = await http.post("/v1/chat/completions", json=CHAT | {"messages": called(arguments)})
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("text", ["é", "4", "/w=="])
async def test_encrypted_reasoning_of_others(chatty: Gateway, text: str) -> None:
    item = {"type": "reasoning", "encrypted_content": text}
    async with chatty.client() as http:
        response = await http.post("/v1/responses", json={"model": MODEL.id, "input": [item]})
    assert response.status_code == 400
    assert "'encrypted_content' is not of this gateway" in response.json()["error"]["message"]


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc00x", r"\ud83d\ud83d", r"\ud83d\ude42"])
async def test_halves_of_characters_in_a_call(chatty: Gateway, escape: str) -> None:
    """A model may write them in arguments, and half a character is no text."""
    written = '{"name": "weather", "arguments": {"city": "' + escape + '"}}'
    says(chatty.backend, f"<tool_call>{written}</tool_call>")
    async with chatty.client() as http:
        chat = await http.post("/v1/chat/completions", json=CHAT | {"tools": tools()})
        tool = {"name": "weather", "input_schema": {}}
        asked = {"model": MODEL.id, "max_tokens": 99, "messages": ASK, "tools": [tool]}
        message = await http.post("/v1/messages", json=asked)
    [call] = chat.json()["choices"][0]["message"]["tool_calls"]
    city = json.loads(call["function"]["arguments"])["city"]
    city.encode()
    assert message.status_code == 200, message.text
    assert message.json()["content"][0]["input"] == {"city": city}


@pytest.mark.timed
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [60] * 400_000}),
        ("/tokenize", {"prompt": "a " * 120_000, "return_token_strs": True}),
        ("/v1/completions", {"prompt": [60] * 400_000}),
    ],
)
async def test_long_ones_hold_up_nobody(chatty: Gateway, path: str, body: dict[str, Any]) -> None:
    content = json.dumps({"model": MODEL.id} | body).encode()
    worst = 0.0
    async with chatty.client() as http, chatty.client() as probe:
        headers = {"Content-Type": "application/json"}
        asking = asyncio.create_task(http.post(path, content=content, headers=headers))
        while not asking.done():
            started = time.thread_time()
            await probe.get("/livez")
            worst = max(worst, time.thread_time() - started)
            await asyncio.sleep(0.005)
    assert (await asking).status_code == (400 if "completions" in path else 200)
    # The gateway's loop is this thread's: what it computes in between counts.
    assert worst < 0.3
