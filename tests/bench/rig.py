"""What the gateway's benches share: simulated workers, a gateway, and clients that cost little themselves."""

import asyncio
import contextlib
import os
import platform
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
import psutil

from moebius_cli.ports import WORKER_PORTS
from moebius_common.child import dies_with_us
from tests.ports import free_port
from tests.stack import MOEBIUS
from tests.waiting import until

MODEL = "sim"


@contextlib.asynccontextmanager
async def simulated(*flags: str, workers: int = 1) -> AsyncIterator[list[str]]:
    """Simulated workers: one with an engine process of its own, or many in one process. Yields addresses."""
    # Many in a row are free where neither a test nor `moebius up` takes its ports.
    first = free_port() if workers == 1 else random.randrange(10_000, WORKER_PORTS.start - workers)
    command = (sys.executable, "-m", "moebius_worker", "--engine", "sim")
    if workers > 1:
        command = (str(MOEBIUS), "sim", "--workers", str(workers))
    process = await asyncio.create_subprocess_exec(
        *dies_with_us(*command, "--listen", f"127.0.0.1:{first}", *flags),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield [f"127.0.0.1:{first + number}" for number in range(workers)]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@dataclass(frozen=True)
class Gateway:
    host: str
    port: int
    admin: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def rss(self) -> int:
        return self.process.memory_info().rss

    async def metrics(self) -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://{self.admin}/metrics")).text

    async def ready_workers(self) -> int:
        found = re.search(
            r'^moebius_gateway_workers\{state="READY"\} (\S+)', await self.metrics(), re.MULTILINE
        )
        return 0 if found is None else int(float(found[1]))


@contextlib.asynccontextmanager
async def gateway(
    workers: Sequence[str],
    *flags: str,
    profile: Path | None = None,
    module: Sequence[str] = ("moebius_gateway",),
    cpus: set[int] | None = None,
) -> AsyncIterator[Gateway]:
    """Yields when all workers are ready. `profile`: where to leave what cProfile saw. `module`: what to run
    with `python -m`, and its first arguments. `cpus`: where alone it may run."""
    port, admin = free_port(), f"127.0.0.1:{free_port()}"
    program = ["-m", *module]
    if profile is not None:
        program = ["-m", "cProfile", "-o", str(profile), *program]
    process = await asyncio.create_subprocess_exec(
        *dies_with_us(sys.executable, *program),
        *("--listen", f"127.0.0.1:{port}", "--admin-listen", admin, "--workers", ",".join(workers)),
        *("--log-level", "error", *flags),
    )
    if cpus is not None:
        # It has one thread yet; those to come inherit this.
        os.sched_setaffinity(process.pid, cpus)
    running = Gateway("127.0.0.1", port, admin, psutil.Process(process.pid))

    async def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://127.0.0.1:{port}/readyz")
                return answer.status_code == 200 and await running.ready_workers() == len(workers)
        return False

    try:
        await until(ready, "the gateway and its workers are ready", 120)
        yield running
    finally:
        process.terminate()
        await process.wait()


def chat(max_tokens: int, content: str = "Hello!", **fields: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return orjson.dumps(body | {"stream": True} | fields)


@dataclass
class Stream(asyncio.Protocol):
    """One request over a connection of its own. Counts events and looks at nothing else."""

    body: bytes
    path: str = "/v1/chat/completions"
    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    # Events with text; the first brings the role alone.
    chunks: int = 0
    # Seconds from the request to the first of them.
    first: float | None = None
    tail: bytes = b""
    done: bool = False
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.begun = time.perf_counter()
        head = f"POST {self.path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(self.body)}\r\n"
        transport.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + self.body)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.status = int(data.split(b" ", 2)[1])
        self.chunks += data.count(b'"delta":{"content":" ')
        if self.chunks and self.first is None:
            self.first = time.perf_counter() - self.begun
        self.tail = (self.tail + data)[-64:]
        # The end of a chunked body, with or without events.
        if self.tail.endswith(b"0\r\n\r\n") or (self.status != 200 and self.tail.endswith(b"}")):
            self.done = b"[DONE]" in self.tail
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def stream(gateway: Gateway, body: bytes, leave_after: float | None = None) -> Stream:
    """Reads one to its end, or leaves after so many seconds."""
    loop = asyncio.get_running_loop()
    _, reading = await loop.create_connection(lambda: Stream(body), gateway.host, gateway.port)
    try:
        await asyncio.wait_for(asyncio.shield(reading.over), leave_after)
    except TimeoutError:
        reading.transport.abort()
    return reading


async def at_rate(rate: float, seconds: float, send: Callable[[int], Awaitable[None]]) -> int:
    """Calls `send(i)` so many times a second, whatever earlier calls do; returns how many there were."""
    loop = asyncio.get_running_loop()
    begun, tasks = loop.time(), set[asyncio.Task[None]]()
    count = int(rate * seconds)
    for i in range(count):
        await asyncio.sleep(max(0.0, begun + i / rate - loop.time()))
        task = asyncio.ensure_future(send(i))
        tasks.add(task)  # type: ignore[arg-type]
        task.add_done_callback(tasks.discard)  # type: ignore[arg-type]
    await asyncio.gather(*tasks)
    return count


def cpus_apart() -> tuple[set[int], set[int]]:
    """One CPU for the gateway, and all others for what loads it; the same for both where there is but one."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def machine() -> str:
    """For the figures' first line."""
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, load average {os.getloadavg()[0]:.1f}"
    )


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
