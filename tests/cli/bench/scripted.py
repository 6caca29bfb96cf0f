"""An endpoint that does what a script says, at known times; raw sockets, so that it may also do it wrong."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

PIECE = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}


@dataclass(frozen=True)
class Script:
    ttft: float = 0.0
    itl: float = 0.0
    # Tokens that one piece holds; the last may hold fewer.
    tokens_a_piece: int = 1
    # Answers end after so many tokens, if not before.
    ends_by_itself: int = 10**9
    models: tuple[str, ...] | None = ("clerk",)
    usage: bool = True
    api_key: str | None = None
    # Fields of requests that are refused with 400.
    unknown: frozenset[str] = frozenset()
    # Instead of an answer: a status and a body.
    refusal: tuple[int, str] | None = None
    # After the first piece: written as it is, and the connection closed; "reset" resets it.
    breaks: bytes | None = None
    # Only so many first requests are answered as scripted, the rest with 500.
    good: int = 10**9
    template_tokens: int = 10
    word_tokens: int = 2


@dataclass
class Endpoint:
    """What happened at it."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    # Of each request that was answered, when its head came, and each piece with text was written.
    written: list[tuple[float, list[float]]] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    peak: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                came = time.monotonic()
                length = head.partition("content-length: ")[2].split("\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                self.in_flight += 1
                self.peak = max(self.peak, self.in_flight)
                try:
                    if not await self._answer(writer, head, body, came):
                        break
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, head: str, body: bytes, came: float) -> bool:
        """Whether the connection goes on."""
        script = self.script
        if script.api_key is not None and f"authorization: bearer {script.api_key}\r\n" not in head:
            return _plain(writer, 401, _error("no such key", "invalid_api_key"))
        if head.startswith("get /v1/models "):
            if script.models is None:
                return _plain(writer, 404, "not here")
            return _plain(writer, 200, json.dumps({"data": [{"id": name} for name in script.models]}))
        asked = json.loads(body)
        self.bodies.append(asked)
        if unknown := sorted(script.unknown & asked.keys()):
            return _plain(writer, 400, _error(f"unknown field {unknown[0]}", "invalid_request_error"))
        if script.refusal is not None:
            return _plain(writer, *script.refusal)
        if len(self.bodies) > script.good:
            return _plain(writer, 500, _error("no more", "internal_error"))
        return await self._stream(writer, asked, came)

    async def _stream(self, writer: asyncio.StreamWriter, asked: dict[str, Any], came: float) -> bool:
        script, times = self.script, list[float]()
        self.written.append((came, times))
        tokens = min(asked.get("max_tokens") or asked["max_completion_tokens"], script.ends_by_itself)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for place in range(0, tokens, script.tokens_a_piece):
            await asyncio.sleep(script.itl if place else script.ttft)
            times.append(time.monotonic())
            _event(writer, {"choices": [PIECE]})
            await writer.drain()
            if script.breaks is not None:
                return _broken(writer, script.breaks)
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if script.usage and asked.get("stream_options"):
            words = len(asked["messages"][0]["content"].split())
            prompt = script.template_tokens + script.word_tokens * words
            _event(writer, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _broken(writer: asyncio.StreamWriter, how: bytes) -> bool:
    if how == b"reset":
        writer.transport.abort()
    else:
        _chunk(writer, how)
        writer.write(b"0\r\n\r\n")
    return False


def _event(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(data).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if data:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _plain(writer: asyncio.StreamWriter, status: int, text: str) -> bool:
    body = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return True


def _error(message: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "code": code}})


@contextmanager
def scripted(script: Script | None = None, **changes: Any) -> Iterator[Endpoint]:
    """Serves in a thread with a loop of its own, since what is tested runs loops too."""
    endpoint = Endpoint(replace(script or Script(), **changes))
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def main() -> None:
        async with await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, backlog=1024) as server:
            endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started.set()
            with_us = asyncio.get_running_loop().create_future()
            stop.append(lambda: loop.call_soon_threadsafe(with_us.set_result, None))
            await with_us
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    stop: list[Any] = []
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield endpoint
    finally:
        while not stop:
            time.sleep(0.001)
        stop[0]()
        thread.join()
        loop.close()
