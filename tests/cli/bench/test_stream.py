"""One request: what is timed, against the server's own record of when it wrote; and what can go wrong."""

import asyncio
import json
import statistics
from collections.abc import Iterator

import httpx
import pytest

from moebius_cli.bench.connections import Connections
from moebius_cli.bench.endpoint import Dialect
from moebius_cli.bench.stream import Lines, Stream, Tally, ask, has_text
from tests.cli.bench.scripted import Endpoint, scripted
from tests.ports import free_port


async def asked(url: str, tokens: int = 8, *, limit: float = 30.0, tally: Tally | None = None) -> Stream:
    async with Connections(httpx.URL(url + "/v1"), None) as connections, connections.one() as client:
        return await ask(client, Dialect().body("clerk", "Hello!", tokens), limit, tally or Tally())


def failure(endpoint: Endpoint | str, limit: float = 30.0) -> tuple[str, str]:
    url = endpoint if isinstance(endpoint, str) else endpoint.url
    tally = Tally()
    stream = asyncio.run(asked(url, limit=limit, tally=tally))
    assert stream.error is not None
    assert stream.ended >= stream.begun
    assert (tally.completed, tally.failed, tally.in_flight) == (0, 1, 0)
    return stream.error.kind, str(stream.error)


@pytest.mark.timed
def test_times_are_those_of_the_bytes() -> None:
    with scripted(ttft=0.15, itl=0.03) as endpoint:
        stream = asyncio.run(asked(endpoint.url, 10))
    [(came, written)] = endpoint.written
    assert stream.error is None
    assert len(stream.arrivals) == len(written) == 10
    delays = [arrival - wrote for arrival, wrote in zip(stream.arrivals, written, strict=True)]
    assert 0 <= came - stream.begun < 0.25
    assert min(delays) >= 0
    assert max(delays) < 0.25
    assert statistics.median(delays) < 0.02
    assert stream.ended >= stream.arrivals[-1]


def test_tokens_are_those_of_usage() -> None:
    tally = Tally()
    with scripted(tokens_a_piece=3) as endpoint:
        stream = asyncio.run(asked(endpoint.url, 8, tally=tally))
    assert (len(stream.arrivals), stream.output_tokens, stream.input_tokens) == (3, 8, 12)
    assert tally == Tally(in_flight=0, completed=1, failed=0, chunks=3)


def test_without_usage() -> None:
    with scripted(usage=False) as endpoint:
        stream = asyncio.run(asked(endpoint.url, 8))
    assert (len(stream.arrivals), stream.output_tokens, stream.input_tokens) == (8, None, None)


ERROR_EVENT = b'data: {"error": {"message": "no worker came back", "code": "engine_dead"}}\n\n'


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (
            {"refusal": (429, '{"error": {"message": "later", "code": "overloaded"}}')},
            "HTTP 429 (overloaded)",
            "later",
        ),
        ({"refusal": (404, '{"error": {"message": "no m", "code": null}}')}, "HTTP 404", "no m"),
        ({"refusal": (502, "<h1>Bad Gateway</h1>")}, "HTTP 502", "<h1>Bad Gateway</h1>"),
        ({"refusal": (500, '{"error": "so"}')}, "HTTP 500", "so"),
        ({"breaks": b""}, "cut off", "without a finish_reason"),
        ({"breaks": b"reset"}, "connection lost", ""),
        ({"breaks": ERROR_EVENT}, "error in the stream (engine_dead)", "no worker came back"),
        ({"breaks": b"data: {oops\n\n"}, "malformed", "{oops"),
        ({"breaks": b"data: [1]\n\n"}, "malformed", "[1]"),
        ({"ends_by_itself": 0}, "no text", "nothing to time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_goes_wrong_has_a_kind(script: dict[str, object], kind: str, message: str) -> None:
    with scripted(**script) as endpoint:
        found = failure(endpoint)
    assert found[0] == kind
    assert message in found[1]


def test_an_answer_that_takes_too_long() -> None:
    with scripted(ttft=30.0) as endpoint:
        assert failure(endpoint, limit=0.2) == ("timeout", "not complete after 0.2 s")


def test_nobody_listens() -> None:
    assert failure(f"http://127.0.0.1:{free_port()}")[0] == "connect"


def test_a_connection_serves_again_after_its_stream() -> None:
    async def twice(url: str) -> list[Stream]:
        async with Connections(httpx.URL(url + "/v1"), None) as connections:
            streams = []
            for _ in range(2):
                async with connections.one() as client:
                    streams.append(await ask(client, Dialect().body("m", "Hello!", 2), 30, Tally()))
            assert len(connections._idle) == 1
            return streams

    with scripted() as endpoint:
        assert [stream.error for stream in asyncio.run(twice(endpoint.url))] == [None, None]
        assert endpoint.connections == 1


def cuts(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((data[:place], data[place:]) for place in range(len(data) + 1))


def test_events_are_found_wherever_bytes_are_cut() -> None:
    data = ': keep-alive\n\nevent: x\r\ndata: {"a": "🙂"}\r\n\r\ndata:[DONE]\n\n'.encode()
    for first, second in cuts(data):
        lines = Lines()
        payloads = [*lines.feed(first), *lines.feed(second)]
        assert payloads == [json.dumps({"a": "🙂"}, ensure_ascii=False).encode(), b"[DONE]"]


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({}, False),
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": None, "tool_calls": []}, False),
        ({"content": " "}, True),
        ({"reasoning_content": "so"}, True),
        ({"reasoning": "so"}, True),
        ({"tool_calls": [{"index": 0}]}, True),
    ],
)
def test_what_is_text(delta: dict[str, object], expected: bool) -> None:
    assert has_text(delta) is expected
