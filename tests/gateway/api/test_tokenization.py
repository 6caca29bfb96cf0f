"""/tokenize and /detokenize, and what is refused by URL or too large, in each dialect's error shape."""

from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.gateway.api.chatty import ASK, MODEL, last, tools
from tests.gateway.http_server import Gateway, ScriptedBackend, running_gateway, tokenizer_files

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(chatty: Gateway, prefix: str) -> None:
    async with chatty.client() as http:
        body = {"model": MODEL.id, "prompt": "Hi 🙂<|im_end|>", "return_token_strs": True}
        answer = (await http.post(f"{prefix}/tokenize", json=body)).json()
        expected = Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"]).encode(body["prompt"])
        assert answer["tokens"] == expected.ids
        assert (answer["count"], answer["max_model_len"]) == (len(expected.ids), MODEL.max_model_len)
        assert (answer["token_strs"][0], answer["token_strs"][-1]) == ("H", "<|im_end|>")
        back = await http.post(f"{prefix}/detokenize", json={"model": MODEL.id, "tokens": answer["tokens"]})
    assert back.json() == {"prompt": body["prompt"]}


async def test_a_chat_is_what_chat_completions_make_of_it(chatty: Gateway) -> None:
    asked = {"model": MODEL.id, "messages": ASK, "tools": tools()}
    asked["chat_template_kwargs"] = {"enable_thinking": False}
    async with chatty.client() as http:
        tokens = (await http.post("/tokenize", json=asked)).json()["tokens"]
        await http.post("/v1/chat/completions", json=asked)
    assert tuple(tokens) == last(chatty).prompt_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": ASK}, "prompt"),
        ("tokenize", {"prompt": "x", "speed": 1}, "speed"),
        ("detokenize", {"tokens": [MODEL.vocab_size]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_refused_by_name(chatty: Gateway, path: str, body: dict[str, Any], param: str) -> None:
    async with chatty.client() as http:
        response = await http.post(f"/{path}", json=body | {"model": MODEL.id})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["embeddings", "audio/speech", "images/generations", "moderations", "files"])
async def test_what_is_not_served_is_called_that(chatty: Gateway, path: str) -> None:
    async with chatty.client() as http:
        response = await http.post(f"/v1/{path}", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unsupported_endpoint")


async def test_clients_are_told_what_is_not_served(chatty: Gateway) -> None:
    client = chatty.openai()
    calls = [
        client.embeddings.create(model=MODEL.id, input="x"),
        client.images.generate(prompt="x"),
        client.audio.speech.create(model=MODEL.id, voice="alloy", input="x"),
        client.moderations.create(input="x"),
        client.batches.list(),
        client.vector_stores.list(),
        client.fine_tuning.jobs.list(),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as refused:
            await call
        assert refused.value.code == "unsupported_endpoint"


async def test_errors_have_the_shape_of_what_was_called() -> None:
    async with (
        running_gateway(ScriptedBackend(), max_body_bytes=500) as gateway,
        gateway.client() as http,
    ):
        for content, status, kind in [
            (b"x" * 501, 413, "request_too_large"),
            (b"{", 400, "invalid_request_error"),
            (
                b'{"model": "none", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]}',
                404,
                "not_found",
            ),
        ]:
            headers = {"content-type": "application/json"}
            response = await http.post("/v1/messages", content=content, headers=headers)
            assert response.status_code == status
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"].startswith(kind)
            assert response.json()["error"].keys() == {"type", "message"}
        assert (await http.get("/v1/messages")).json()["type"] == "error"
        assert (await http.post("/v1/messages/batches")).json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz"])
async def test_probes_by_head(chatty: Gateway, path: str) -> None:
    async with chatty.client() as http:
        head, get = await http.head(path), await http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
