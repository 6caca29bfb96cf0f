"""The gateway's CPU time for each streamed token: a stand-in emits tokens at a set rate, clients read SSE.

Run: python -m tests.bench.gateway_cpu [--streams 64] [--rate 30] [--tokens 300]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from moebius_common.child import dies_with_us
from tests.gateway.dispatching import process
from tests.gateway.worker_standin import FIRST_TOKEN
from tests.ports import free_port
from tests.stack import until
from tests.tiny import write_tokenizer


@dataclass(frozen=True)
class Load:
    """`streams` at a time, each of `tokens` tokens, `rate` tokens a second in each."""

    streams: int
    rate: float
    tokens: int


@dataclass(frozen=True)
class Figures:
    tokens: int
    cpu_seconds: float
    wall_seconds: float

    def line(self, load: Load) -> str:
        return (
            f"gateway CPU per streamed token: {1e6 * self.cpu_seconds / self.tokens:.0f} us "
            f"({load.streams} streams x {load.rate:g} tokens/s, "
            f"{self.tokens} tokens in {self.wall_seconds:.1f} s, "
            f"{self.cpu_seconds / self.wall_seconds:.0%} of a core; load average {os.getloadavg()[0]:.1f})"
        )


async def read(client: httpx.AsyncClient, body: Mapping[str, object]) -> int:
    """Reads one stream to its end; returns the tokens that its usage counts."""
    usage = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if '"completion_tokens"' in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return usage


async def measure(load: Load) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        async with process("--rate", str(load.rate), "--tokenizer", folder) as worker:
            url = f"127.0.0.1:{free_port()}"
            gateway = await asyncio.create_subprocess_exec(
                *dies_with_us(
                    *(sys.executable, "-m", "moebius_gateway"),
                    *("--listen", url, "--workers", worker.address, "--log-level", "warning"),
                )
            )
            try:
                return await _measure(load, f"http://{url}", psutil.Process(gateway.pid))
            finally:
                gateway.terminate()
                await gateway.wait()


async def _measure(load: Load, url: str, gateway: psutil.Process) -> Figures:
    limits = httpx.Limits(max_connections=load.streams)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def ready() -> bool:
            try:
                return (await client.get("/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, 30, "the gateway is ready")
        body = {
            "model": "standin",
            "prompt": [FIRST_TOKEN, FIRST_TOKEN + 1],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Warm: first requests load the tokenizer.
        await read(client, body | {"max_tokens": 2})
        loop = asyncio.get_running_loop()
        before, begun = gateway.cpu_times(), loop.time()
        streams = [read(client, body | {"max_tokens": load.tokens, "seed": i}) for i in range(load.streams)]
        tokens = sum(await asyncio.gather(*streams))
        after, ended = gateway.cpu_times(), loop.time()
        if tokens != load.streams * load.tokens:
            raise RuntimeError(f"{tokens} tokens came, not {load.streams * load.tokens}")
        cpu = after.user + after.system - before.user - before.system
        return Figures(tokens, cpu, ended - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=30.0, help="tokens a second in each stream")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each stream")
    load = Load(**vars(parser.parse_args()))
    print(asyncio.run(measure(load)).line(load))


if __name__ == "__main__":
    main()
