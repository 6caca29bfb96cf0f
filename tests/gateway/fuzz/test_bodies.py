"""Bodies that nobody means well with: an error in the dialect's shape, or an answer, and never a 5xx."""

import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.api.chatty import ASK, MODEL, SCHEMA, tools
from tests.gateway.http_server import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")
HOLE = "\0hole"
CHAT: dict[str, Any] = {
    "model": MODEL.id,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ],
    "tools": tools(strict=True),
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "structured_outputs": {"choice": ["a"]},
    "metadata": {"a": "b"},
    "seed": 1,
    "temperature": 0.5,
    "max_tokens": 5,
}
MESSAGES: dict[str, Any] = {
    "model": MODEL.id,
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "dry"}]},
    ],
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "u"},
}
RESPONSES: dict[str, Any] = {
    "model": MODEL.id,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "aG0="},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "dry"},
    ],
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "high"},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": "resp_1",
    "tool_choice": "auto",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL.id, "prompt": ["Hi", [5, 6]], "echo": True, "guided_regex": "a+"},
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {k: v for k, v in MESSAGES.items() if k not in ("max_tokens", "metadata")},
    "/v1/responses": RESPONSES,
    "/tokenize": {"model": MODEL.id, "messages": ASK, "tools": tools()},
    "/detokenize": {"model": MODEL.id, "tokens": [5, 6]},
}
# JSON, and what only looks like it, in place of a value.
NASTY = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 400, "-0", "1.0", "9223372036854775808"),
    *("18446744073709551616", "-9223372036854775809", "0x10", "01", "1.", "'x'", "tru", "undefined", ""),
    *("null", "true", "false", "0", "-1", "[]", "{}", '""', '"\\ud800"', '"\\u0000"', '"\\x"', '"x'),
    *("[" * 99 + "]" * 99, "[" * 5000 + "]" * 5000, '{"a":' * 99 + "1" + "}" * 99, '{"a":' * 5000),
    *('{"a":1,"a":2}', '{"":1}', '{"__class__":{}}', '{"type":"object","$ref":"#"}', '{"$ref":"#/x/y"}'),
    *(
        '{"type":["string","null"],"pattern":"("}',
        '{"type":"text","text":"x"}',
        '[[1],["x"],{}]',
        '"{{7*7}}"',
    ),
    *('"' + "x" * 70_000 + '"', "[" + "1," * 3000 + "1]", '{"anyOf":' * 40 + "[]" + "}" * 40),
]
BYTES = [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\0", b"\xef\xbb\xbf", b"}", b'"', b","]


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, one in inner for path in paths(one, (*at, key)))]


def replaced(body: Any, path: tuple[Any, ...], text: str) -> str:
    """The body as JSON, with `text` in place of what is at `path`."""
    if not path:
        return text
    body = copy.deepcopy(body)
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = HOLE
    return json.dumps(body).replace(json.dumps(HOLE), text)


@st.composite
def hostile(draw: st.DrawFn) -> tuple[str, bytes]:
    """A URL and a body: an ordinary one with one to three things wrong."""
    url = draw(st.sampled_from(sorted(BODIES)))
    body = {k: v for k, v in BODIES[url].items() if k in ("model", "messages", "input", "prompt", "tokens")}
    body |= {k: v for k, v in BODIES[url].items() if draw(st.booleans())}
    data = replaced(body, draw(st.sampled_from(paths(body))), draw(st.sampled_from(NASTY))).encode()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("insert", "cut", "double"))):
            case "insert":
                data = data[:at] + draw(st.sampled_from(BYTES)) + data[at:]
            case "cut":
                data = data[:at]
            case "double":
                data = data.replace(b"{", b'{"model": "org/chatty", ', 1)
    return url, data


def check(url: str, answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        return
    told = answer.json()
    if answer.status_code == 200:
        return
    if url.startswith("/v1/messages"):
        assert told["type"] == "error"
        assert told["error"].keys() == {"type", "message"}
    else:
        assert told["error"].keys() == {"message", "type", "param", "code"}
    assert told["error"]["message"]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(sent=hostile())
async def test_no_body_breaks_anything(chatty: Gateway, sent: tuple[str, bytes]) -> None:
    url, body = sent
    async with chatty.client() as client:
        answer = await client.post(url, content=body, headers={"content-type": "application/json"})
    check(url, answer)


@pytest.mark.parametrize("url", sorted(BODIES))
async def test_every_place_takes_every_nasty_value(chatty: Gateway, url: str) -> None:
    body = BODIES[url]
    async with chatty.client() as client:
        for number, path in enumerate(paths(body)):
            # A part of the values for each place: all of them for all places together.
            for text in NASTY[number % 5 :: 5]:
                content = replaced(body, path, text).encode()
                answer = await client.post(url, content=content, headers={"content-type": "application/json"})
                check(url, answer)


@pytest.mark.parametrize("body", [b'{"model": "a", "model": "org/chatty", "prompt": "x"}'])
async def test_of_two_equal_keys_the_last_counts(chatty: Gateway, body: bytes) -> None:
    async with chatty.client() as client:
        answer = await client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 200
