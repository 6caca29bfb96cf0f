"""A parameter is honoured or refused by name."""

import json
from typing import Any

import pytest

from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, running_gateway
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": [{"role": "user", "content": "Hi"}]}
PLAIN: dict[str, Any] = {"model": MODEL.id, "prompt": "Hi"}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "plain": ("/v1/completions", PLAIN)}

BOTH = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 1e400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-40),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop", ["x"] * 17),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", "x" * 1025),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", []),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("best_of", 2),
    ("best_of", True),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "xml"}),
    ("guided_json", {"type": "strin"}),
    ("guided_json", "{"),
    ("guided_regex", "a(b"),
    ("guided_choice", []),
    ("guided_grammar", "start: nothing_of_that_name"),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"structural_tag": {}}),
    ("use_beam_search", True),
    ("user", 5),
    ("speed", "ludicrous"),
    ("model", ""),
    ("model", "x" * 257),
]
CHAT_ONLY = [
    ("messages", []),
    ("messages", "Hi"),
    ("max_completion_tokens", 0),
    ("logprobs", 5),
    ("top_logprobs", 5),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("reasoning_effort", "high"),
    ("modalities", ["text", "audio"]),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("prompt", "Hi"),
    ("echo", True),
]
PLAIN_ONLY = [
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", [1, "a"]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", ""),
    ("prompt", [VOCAB_SIZE]),
    ("prompt", [-1]),
    ("prompt", ["a"] * 129),
    ("logprobs", 21),
    ("logprobs", True),
    ("echo", 1),
    ("suffix", "end"),
    ("messages", []),
    ("tools", []),
]
CASES = [
    *(("chat", *case) for case in BOTH + CHAT_ONLY),
    *(("plain", *case) for case in BOTH + PLAIN_ONLY),
]


def error_of(response: Any) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(("path", "name", "value"), CASES)
async def test_refused_by_name(gateway: Gateway, path: str, name: str, value: Any) -> None:
    url, valid = PATHS[path]
    async with gateway.client() as client:
        body = json.dumps(valid | {name: value})
        response = await client.post(url, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    # JSON that is none has no parameters.
    assert error["code"] == "invalid_json" if "Infinity" in body else (error["param"] or "").startswith(name)
    assert not gateway.backend.generations


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "stop": None,
    "stop_token_ids": [],
    "temperature": None,
    "seed": None,
    "stream_options": None,
    "service_tier": "auto",
    "store": False,
    "user": "me",
    "metadata": {"k": "v"},
    "skip_special_tokens": True,
}
NEUTRAL_CHAT = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "reasoning_effort": None,
    "chat_template_kwargs": {},
}


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("chat", NEUTRAL | NEUTRAL_CHAT),
        ("plain", NEUTRAL | {"echo": False, "suffix": None, "logprobs": None}),
    ],
)
async def test_values_that_change_nothing_are_accepted(
    gateway: Gateway, path: str, extra: dict[str, Any]
) -> None:
    url, valid = PATHS[path]
    async with gateway.client() as client:
        response = await client.post(url, json=valid | extra)
    assert response.status_code == 200, response.text


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": ["text"]}, "messages[0].content"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ("x", "messages[0]"),
    ],
)
async def test_messages_are_checked_in_place(gateway: Gateway, message: Any, param: str) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"messages": [message]})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_text_parts_and_all_roles(gateway: Gateway) -> None:
    roles = ["system", "developer", "user", "assistant", "tool"]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with gateway.client() as client:
        messages = [{"role": role, "content": parts} for role in roles]
        response = await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert response.status_code == 200, response.text
    [generation] = gateway.backend.generations
    prompt = b"".join(map(gateway.backend.text.token_bytes.spelling, generation.prompt_ids)).decode()
    assert prompt.count("one\ntwo") == 5
    assert "developer" not in prompt, "the template does not know the role"


async def test_the_context_is_a_limit(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for prompt, min_tokens in (([5] * MODEL.max_model_len, 0), ([5] * (MODEL.max_model_len - 5), 6)):
            body = PLAIN | {"prompt": prompt, "min_tokens": min_tokens}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert error_of(response)["code"] == "context_length_exceeded"
        fits = await client.post("/v1/completions", json=PLAIN | {"prompt": [5] * (MODEL.max_model_len - 1)})
        assert fits.status_code == 200
    assert [generation.max_tokens for generation in gateway.backend.generations] == [1]


async def test_more_than_the_most_cannot_be_the_least(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for path, body in (("completions", PLAIN), ("chat/completions", CHAT)):
            response = await client.post(f"/v1/{path}", json=body | {"max_tokens": 3, "min_tokens": 4})
            assert (response.status_code, error_of(response)["param"]) == (400, "min_tokens")
        equal = await client.post("/v1/completions", json=PLAIN | {"max_tokens": 3, "min_tokens": 3})
        assert equal.status_code == 200


async def test_what_must_go_on_may_not_stop_at_every_token(gateway: Gateway) -> None:
    """Nothing could be drawn, which would look like a defect of the model, and of the worker."""
    async with gateway.client() as client:
        every = {"stop_token_ids": list(range(VOCAB_SIZE))}
        response = await client.post("/v1/completions", json=PLAIN | every | {"min_tokens": 1})
        assert (response.status_code, error_of(response)["param"]) == (400, "stop_token_ids")
        for fits in (every, {"stop_token_ids": every["stop_token_ids"][:-1], "min_tokens": 1}):
            assert (await client.post("/v1/completions", json=PLAIN | fits)).status_code == 200


async def test_choices_are_bounded_over_all_prompts(gateway: Gateway) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/completions", json=PLAIN | {"prompt": ["a"] * 65, "n": 2})
    assert response.status_code == 400
    assert error_of(response)["param"] == "n"


async def test_two_names_of_one_limit_must_agree(gateway: Gateway) -> None:
    async with gateway.client() as client:
        limits = {"max_tokens": 5, "max_completion_tokens": 5}
        assert (await client.post("/v1/chat/completions", json=CHAT | limits)).status_code == 200
        response = await client.post("/v1/chat/completions", json=CHAT | limits | {"max_tokens": 6})
    assert response.status_code == 400
    assert error_of(response)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"\\ud83d"', "application/json", 400),
        (b'{"model": "\xff"}', "application/json", 400),
        (b'{"model": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (json.dumps(CHAT).encode(), "text/plain", 400),
        (json.dumps(CHAT).encode(), "", 400),
        (json.dumps(CHAT).encode(), "Application/JSON; charset=utf-8", 200),
    ],
)
async def test_bodies(gateway: Gateway, content: bytes, content_type: str, status: int) -> None:
    async with gateway.client() as client:
        response = await client.post(
            "/v1/chat/completions", content=content, headers={"content-type": content_type}
        )
    assert response.status_code == status
    if status == 400:
        assert error_of(response)["type"] == "invalid_request_error"


async def test_large_bodies_are_refused_with_and_without_a_length() -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with running_gateway(ScriptedBackend(), max_body_bytes=1000) as gateway, gateway.client() as client:
        for content in (b"x" * 1001, chunks()):
            response = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
            assert error_of(response)["code"] == "request_too_large"
        assert (await client.post("/v1/completions", json=PLAIN)).status_code == 200


async def test_unknown_model_and_url(gateway: Gateway) -> None:
    async with gateway.client() as client:
        missing = await client.post("/v1/chat/completions", json=CHAT | {"model": "none"})
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
        for method, path in [("POST", "/v1/nonsense"), ("POST", "/v2/responses"), ("GET", "/")]:
            response = await client.request(method, path)
            assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
            assert error_of(response)["message"] == f"unknown URL: {path}"


async def test_a_wrong_method_is_called_that(gateway: Gateway) -> None:
    async with gateway.client() as client:
        response = await client.get("/v1/chat/completions")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert error_of(response)["message"] == "method not allowed: GET /v1/chat/completions"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("timeout", ["0", "-1", "x", "nan", "inf", "99999"])
async def test_the_timeout_header_is_checked(gateway: Gateway, timeout: str) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/completions", json=PLAIN, headers={"X-Request-Timeout": timeout})
    assert response.status_code == 400
    assert "X-Request-Timeout" in error_of(response)["message"]


async def test_a_prompt_s_log_probabilities_are_refused(gateway: Gateway) -> None:
    body = {"model": MODEL.id, "prompt": "Hi", "echo": True, "logprobs": 0}
    async with gateway.client() as client:
        refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
