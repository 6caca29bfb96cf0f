"""How a body is read and parsed: nobody holds up others with one that is long or never comes."""

import asyncio
import threading
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, model_validator
from starlette.requests import Request
from starlette.types import Message

from moebius_gateway.api import body as body_module
from moebius_gateway.api.body import INLINE_BYTES, parse
from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.interruption import ClientGoneError


class Body(BaseModel):
    text: str
    thread: int = 0

    @model_validator(mode="before")
    @classmethod
    def _tell(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data | {"thread": threading.get_ident()}


def request(content: bytes, then: Message | None = None) -> Request:
    """`then`: what comes after a first part, nothing ever if empty; None: the first part is the whole."""
    messages = [{"type": "http.request", "body": content, "more_body": then is not None}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        if not then:
            await asyncio.Event().wait()
        return then or {}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


@pytest.mark.parametrize(("size", "inline"), [(10, True), (INLINE_BYTES + 1, False)])
async def test_large_bodies_are_parsed_in_a_thread(size: int, inline: bool) -> None:
    parsed = await parse(request(orjson.dumps({"text": "x" * size})), Body)
    assert len(parsed.text) == size
    assert (parsed.thread == threading.get_ident()) is inline


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1])
async def test_faults_are_the_same_in_both(size: int) -> None:
    with pytest.raises(ApiError) as refused:
        await parse(request(b'{"text": "' + b"x" * size), Body)
    assert refused.value.code == "invalid_json"
    with pytest.raises(ApiError) as refused:
        await parse(request(orjson.dumps({"text": ["x" * size]})), Body)
    assert refused.value.param == "text"


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_ours() -> None:
    with pytest.raises(ClientGoneError):
        await parse(request(b'{"te', {"type": "http.disconnect"}), Body)


async def test_a_body_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.05)
    with pytest.raises(ApiError) as refused:
        await parse(request(b'{"te', {}), Body)
    assert (refused.value.status, refused.value.code) == (408, "request_timeout")


@pytest.mark.parametrize("wrap", [lambda inner: {"text": inner}, lambda inner: [inner]])
async def test_what_is_nested_too_deep_is_refused_and_what_is_wide_is_not(wrap: Any) -> None:
    deep: Any = "x"
    for _ in range(150):
        deep = wrap(deep)
    with pytest.raises(ApiError, match="nested deeper") as refused:
        await parse(request(orjson.dumps({"text": deep})), Body)
    assert refused.value.status == 400
    with pytest.raises(ApiError) as refused:
        await parse(request(orjson.dumps({"text": [[]] * 1000})), Body)
    assert refused.value.param == "text"
