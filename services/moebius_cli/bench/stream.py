"""One streamed request, and when each piece of its answer arrived."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

SHOWN_CHARACTERS = 300


class RequestError(Exception):
    """A request that was not answered whole. `kind`: under which it is counted."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


@dataclass
class Tally:
    """What goes on, for a progress bar."""

    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    chunks: int = 0


@dataclass
class Stream:
    """A request. Times are of the monotonic clock."""

    begun: float
    # Of each piece with text, when its bytes came.
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    # As the endpoint tells in `usage`.
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: RequestError | None = None


async def ask(client: httpx.AsyncClient, body: bytes, limit: float, tally: Tally) -> Stream:
    """Sends a chat completion and reads it to its end. `limit`: seconds for all of it.

    Never raises for what the endpoint does: that is the stream's `error`.
    """
    stream = Stream(time.monotonic())
    tally.in_flight += 1
    try:
        async with asyncio.timeout(limit):
            await _read(client, body, stream, tally)
        tally.completed += 1
    except RequestError as error:
        stream.error = error
    except TimeoutError:
        stream.error = RequestError("timeout", f"not complete after {limit:g} s")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        stream.error = RequestError("connect", str(error) or "no connection in time")
    except httpx.HTTPError as error:
        stream.error = RequestError("connection lost", str(error) or type(error).__name__)
    finally:
        stream.ended = time.monotonic()
        tally.in_flight -= 1
    tally.failed += stream.error is not None
    return stream


async def _read(client: httpx.AsyncClient, body: bytes, stream: Stream, tally: Tally) -> None:
    complete = False
    lines = Lines()
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", "chat/completions", content=body, headers=headers) as response:
        if response.status_code != 200:
            raise refusal(response.status_code, await response.aread())
        async for data in response.aiter_raw():
            now = time.monotonic()
            for payload in lines.feed(data):
                if payload == b"[DONE]":
                    complete = True
                    continue
                chunk = _parsed(payload)
                for choice in chunk.get("choices") or ():
                    if has_text(choice.get("delta") or {}):
                        stream.arrivals.append(now)
                        tally.chunks += 1
                    complete |= choice.get("finish_reason") is not None
                if usage := chunk.get("usage"):
                    stream.input_tokens = usage.get("prompt_tokens")
                    stream.output_tokens = usage.get("completion_tokens")
    if not complete:
        raise RequestError("cut off", "the stream ended without a finish_reason and without [DONE]")
    if not stream.arrivals:
        raise RequestError("no text", "the answer has no text: there is nothing to time")


class Lines:
    """The payloads of server-sent events, from bytes cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def has_text(delta: dict[str, Any]) -> bool:
    """Whether a piece brings something that was generated: content, reasoning, a tool call."""
    return any(value for name, value in delta.items() if name != "role")


def _parsed(payload: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError as error:
        raise RequestError("malformed", _shortened(payload)) from error
    if not isinstance(chunk, dict):
        raise RequestError("malformed", _shortened(payload))
    if chunk.get("error"):
        raise RequestError(f"error in the stream{_code(chunk['error'])}", _message(chunk["error"]))
    return chunk


def refusal(status: int, body: bytes) -> RequestError:
    """The error of an HTTP status, in the endpoint's own words."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return RequestError(f"HTTP {status}", _shortened(body), status)
    return RequestError(f"HTTP {status}{_code(said)}", _message(said), status)


def _code(error: Any) -> str:
    code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return f" ({code})" if code else ""


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:SHOWN_CHARACTERS]


def _shortened(body: bytes) -> str:
    return body[:SHOWN_CHARACTERS].decode(errors="replace")
