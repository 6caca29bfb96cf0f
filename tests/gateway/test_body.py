"""Where a body is parsed: what takes long does so in a thread, while the event loop serves others."""

import threading
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, model_validator
from starlette.requests import Request
from starlette.types import Message

from moebius_gateway.api.body import INLINE_BYTES, parse
from moebius_gateway.api.errors import ApiError


class Body(BaseModel):
    text: str
    thread: int = 0

    @model_validator(mode="before")
    @classmethod
    def _tell(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data | {"thread": threading.get_ident()}


def request(content: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

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
