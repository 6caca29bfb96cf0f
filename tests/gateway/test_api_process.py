"""The gateway's process, with its real dispatcher, over a worker stand-in that is a process too."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import orjson
import pytest

from moebius_gateway.auth.keys import hashed, new_key
from tests.gateway.http_server import events
from tests.tiny import write_tokenizer
from tests.waiting import PATIENCE

PLAIN = {"model": "standin", "prompt": "Hi", "seed": 5}


@asynccontextmanager
async def child(
    *arguments: str, env: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        env=os.environ | (env or {}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def worker(folder: Path, rate: float) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Yields its address, and its process."""
    write_tokenizer(folder)
    arguments = ("--rate", str(rate), "--tokenizer", str(folder))
    async with child("tests.gateway.worker_standin", *arguments) as process:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip(), process


class Lines:
    """The log of a gateway, as it is written."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seen = ""

    async def until(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        while not (found := re.search(pattern, self.seen)):
            line = await self.process.stderr.readline()
            assert line, f"{pattern} is not in the log:\n{self.seen}"
            self.seen += line.decode()
        return found


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[httpx.AsyncClient, Lines]]:
    flags = ("--listen", "127.0.0.1:0", "--log-format", "json", *arguments)
    async with child("moebius_gateway", *flags) as process:
        log = Lines(process)
        address = (await log.until(r'"address": ?"(127\.0\.0\.1:\d+)"'))[1]
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            yield client, log


async def ready(client: httpx.AsyncClient, log: Lines) -> None:
    await log.until("text model loaded")
    while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 (there is nothing to be told by)
        await asyncio.sleep(0.02)


@pytest.mark.timed
async def test_serves_what_a_worker_generates(tmp_path: Path) -> None:
    flags = ("--admin-listen", "127.0.0.1:0", "--workers")
    async with worker(tmp_path, 500) as (address, _), serving(*flags, address) as (http, log):
        await ready(http, log)
        base = f"{http.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=20) as client:
            chat = {
                "model": "standin",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 50,
                "seed": 1,
            }
            plain = await client.chat.completions.create(**chat)
            stream = await client.chat.completions.create(**chat, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert plain.usage is not None
            assert plain.usage.completion_tokens == 50
            assert plain.choices[0].finish_reason == "length"
            assert streamed == plain.choices[0].message.content
            assert streamed
        admin = (await log.until(r'"admin_address": ?"(127\.0\.0\.1:\d+)"'))[1]
        assert 'moebius_gateway_worker_streams{worker="' in (await http.get(f"http://{admin}/metrics")).text
        assert (await http.get("/metrics")).status_code == 404


@pytest.mark.timed
async def test_sigterm_drains_and_exits_with_zero(tmp_path: Path) -> None:
    async with worker(tmp_path, 50) as (address, engine), serving("--workers", address) as (http, log):
        await ready(http, log)
        body = PLAIN | {"max_tokens": 30, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            received = ""
            async for text in response.aiter_text():
                if not received:
                    # The stream does not end before the rest is seen.
                    engine.send_signal(signal.SIGSTOP)
                    log.process.send_signal(signal.SIGTERM)
                    await log.until('"draining"')
                    refused = await http.post("/v1/completions", json=PLAIN)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                    assert (await http.get("/readyz")).status_code == 503
                    engine.send_signal(signal.SIGCONT)
                received += text
        assert orjson.loads(events(received)[-2])["choices"][0]["finish_reason"] == "length"
        assert events(received)[-1] == "[DONE]"
        assert await log.process.wait() == 0


async def test_no_key_is_in_the_log_wherever_a_client_puts_it(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys"
    file.write_text(f"team-a {hashed(key)}\n")
    async with serving("--api-keys", str(file), "--log-level", "debug") as (http, log):
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"X-Request-Id": key}):
            await http.post("/v1/completions", json=PLAIN, headers=headers)
            await http.get(f"/v1/models/{key}", headers=headers)
        assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        log.process.terminate()
        await log.process.wait()
        await log.until("draining")
        assert log.process.stderr is not None
        text = log.seen + (await log.process.stderr.read()).decode()
    assert '"client": "team-a"' in text
    assert key not in text
    assert key[20:] not in text


@pytest.mark.timed
async def test_what_is_left_at_the_end_of_the_grace_is_told_so(tmp_path: Path) -> None:
    """Readiness goes first, streams go on, and the last one ends with an error: never just cut."""
    flags = ("--drain-grace", "2", "--workers")
    async with worker(tmp_path, 20) as (address, _), serving(*flags, address) as (http, log):
        await ready(http, log)
        body = PLAIN | {"max_tokens": 1000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            received, before = "", 0
            async for text in response.aiter_text():
                received += text
                if not before:
                    before = len(events(received))
                    log.process.send_signal(signal.SIGTERM)
                    await log.until('"draining"')
                    assert (await http.get("/readyz")).status_code == 503
                    assert (await http.get("/livez")).status_code == 200
        *pieces, last = map(orjson.loads, events(received))
        assert len(pieces) > before + 5, "it went on meanwhile"
        assert last["error"]["code"] == "draining"
        assert not any(piece["choices"][0]["finish_reason"] for piece in pieces)
        assert "[DONE]" not in received
        assert await asyncio.wait_for(log.process.wait(), PATIENCE) == 0
        await log.until("requests were cut off")


@pytest.mark.timed
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with worker(tmp_path, 1) as (address, _), serving("--workers", address) as (http, log):
        await ready(http, log)
        async with http.stream("POST", "/v1/completions", json=PLAIN | {"stream": True}) as response:
            async for _ in response.aiter_text():
                break
            log.process.send_signal(signal.SIGTERM)
            await log.until('"draining"')
            log.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(log.process.wait(), 20) == 0, "before the grace was over"


async def outcome(*arguments: str, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    async with child("moebius_gateway", *arguments, env=env) as process:
        _, errors = await asyncio.wait_for(process.communicate(), PATIENCE)
        return process.returncode, errors.decode()


async def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, errors = await outcome("--listen", address)
    assert code == 1
    assert errors.count("\n") == 1
    assert f"cannot listen on {address} (Address already in use)" in errors
    assert "--listen" in errors


@pytest.mark.parametrize(
    ("arguments", "env", "fault"),
    [
        (("--listen", "8000"), {}, "--listen: '8000' is not an address"),
        (
            (),
            {"MOEBIUS_GATEWAY_DRAIN_GRACE": "-1"},
            "--drain-grace: Input should be greater than or equal to 0",
        ),
        ((), {"MOEBIUS_GATEWAY_CONFIG": "/no/such/file"}, "/no/such/file"),
    ],
)
async def test_wrong_settings_are_named(arguments: tuple[str, ...], env: dict[str, str], fault: str) -> None:
    code, errors = await outcome(*arguments, env=env)
    assert code == 2
    assert fault in errors
    assert "Traceback" not in errors
