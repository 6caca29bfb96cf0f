"""The whole stack as a user starts it: `moebius up` as a child process."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from moebius_cli.state_dir import StateDir
from moebius_cli.view import StackView, view_stack
from tests.ports import free_port
from tests.waiting import until

MOEBIUS = Path(sys.executable).with_name("moebius")
START_TIMEOUT = 90.0
# Longer than the grace of `moebius up`, which is 40 s for each of its two processes.
STOP_TIMEOUT = 90.0


@dataclass
class Stack:
    process: asyncio.subprocess.Process
    url: str
    admin_url: str
    state_dir: Path
    log: Path

    async def view(self) -> StackView:
        """What `moebius status` shows."""
        return await view_stack(StateDir(self.state_dir))

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=200)
        return httpx.AsyncClient(base_url=self.url, timeout=90, limits=limits)

    async def model(self) -> str:
        async with self.client() as client:
            return str((await client.get("/v1/models")).json()["data"][0]["id"])

    async def metric(self, name: str, label: str = "") -> float:
        """The sum over all label sets of a gateway metric, or those with `label`; none at all is an error."""
        async with self.client() as client:
            text = (await client.get(f"{self.admin_url}/metrics")).text
        found = re.findall(rf"^{name}({{.*}})? (\S+)$", text, re.MULTILINE)
        values = [value for labels, value in found if label in labels]
        assert values, f"the gateway exports no {name} {label}"
        return sum(map(float, values))


@asynccontextmanager
async def stack(
    model: Path,
    state_dir: Path,
    *,
    workers: int = 2,
    env: dict[str, str] | None = None,
    start_timeout: float = START_TIMEOUT,
) -> AsyncIterator[Stack]:
    """Starts the stack, waits until it is ready, and at the end stops it as Ctrl-C does."""
    state_dir.mkdir(parents=True, exist_ok=True)
    port, admin = free_port(), f"127.0.0.1:{free_port()}"
    log = state_dir / "up.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            MOEBIUS,
            "up",
            *("--model", model, "--workers", str(workers), "--port", str(port), "--state-dir", state_dir),
            *("--question", ""),
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"MOEBIUS_GATEWAY_ADMIN_LISTEN": admin} | (env or {}),
        )
    running = Stack(process, f"http://127.0.0.1:{port}", f"http://{admin}", state_dir, log)
    try:
        await until(lambda: _ready(running), f"ready; see {log}", start_timeout)
        yield running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        except TimeoutError:
            process.kill()
            raise


async def _ready(running: Stack) -> bool:
    assert running.process.returncode is None, running.log.read_text()
    try:
        async with running.client() as client:
            return (await client.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False
