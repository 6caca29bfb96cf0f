"""The command as a client: what it makes of answers that a gateway, or a proxy before it, may give."""

import json

import httpx
import pytest

from moebius_cli.api import served_model, stream_chat
from moebius_cli.errors import CliError


def answering(status: int, body: str) -> httpx.AsyncClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    return httpx.AsyncClient(base_url="http://gateway", transport=transport)


async def answer(status: int, body: str) -> str:
    async with answering(status, body) as gateway:
        return "".join([text async for text in stream_chat(gateway, "m", [{"role": "user", "content": "?"}])])


def chunk(**delta: object) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta}]}) + "\n\n"


async def test_the_text_of_a_stream() -> None:
    pieces = (chunk(role="assistant"), chunk(content="Hel"), ": keep-alive\n\n", chunk(content="lo 🙂"))
    assert await answer(200, "".join(pieces) + chunk() + "data: [DONE]\n\n") == "Hello 🙂"


async def test_a_refusal_is_told_in_the_gateways_words() -> None:
    with pytest.raises(CliError, match=r"^the model 'm' does not exist$"):
        await answer(404, '{"error": {"message": "the model \'m\' does not exist"}}')


@pytest.mark.parametrize("body", ["<h1>Bad Gateway</h1>", "[]", '{"error": "so"}', "{}"])
async def test_a_refusal_in_words_of_somebody_else(body: str) -> None:
    with pytest.raises(CliError, match="HTTP status 502") as error:
        await answer(502, body)
    assert body in str(error.value)


async def test_an_error_within_a_stream() -> None:
    with pytest.raises(CliError, match="no worker"):
        await answer(200, chunk(content="Hel") + 'data: {"error": {"message": "no worker came back"}}\n\n')


async def test_a_stream_that_breaks() -> None:
    def break_off(_: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("peer closed connection")

    async with httpx.AsyncClient(
        base_url="http://gateway", transport=httpx.MockTransport(break_off)
    ) as gateway:
        with pytest.raises(CliError, match="did not finish"):
            async for _ in stream_chat(gateway, "m", []):
                pass


async def test_the_first_model_is_taken() -> None:
    async with answering(200, '{"data": [{"id": "a"}, {"id": "b"}]}') as gateway:
        assert await served_model(gateway) == "a"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, '{"data": []}', "knows no model"),
        (502, "Bad Gateway", "502"),
        (200, "<html>", "No gateway answers"),
    ],
)
async def test_nobody_to_talk_to(status: int, body: str, words: str) -> None:
    async with answering(status, body) as gateway:
        with pytest.raises(CliError, match=words):
            await served_model(gateway)
