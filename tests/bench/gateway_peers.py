"""This gateway beside litellm's proxy, in one run: what each costs a token, and adds to the first one.

A simulated worker speaks our protocol only, so that the peer's upstream is this gateway's OpenAI surface:
client - litellm - Moebius - worker, beside client - Moebius - worker. What litellm adds is the difference,
what it costs is the CPU time of its own process.

Run: python -m tests.bench.gateway_peers --litellm VENV/bin/litellm [--streams 32] [--rounds 3]
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from moebius_common.child import dies_with_us
from tests.bench.rig import MODEL, Gateway, Stream, chat, gateway, machine, quantile, simulated
from tests.ports import free_port
from tests.waiting import until

TOKENS = 100
# No price list from the network, no log line a request; and no key, as ours has none here.
LITELLM = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
FLAGS = ("--sim.ttft", "0.05", "--sim.itl", "0.01", "--sim.jitter", "0", "--max-running", "512")


class AnyStream(Stream):
    """Of any server: a token is an event with a word in it, wherever in the event that stands."""

    def data_received(self, data: bytes) -> None:
        before = self.chunks
        super().data_received(data)
        self.chunks = before + data.count(b'"content":" ')
        if self.chunks and self.first is None:
            self.first = time.perf_counter() - self.begun


@dataclass
class Figures:
    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    firsts: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        return (
            f"{name:<26} {1e6 * self.cpu / self.tokens:>10.0f} {self.tokens / self.cpu:>14.0f} "
            f"{self.tokens / self.seconds:>12.0f} {1e3 * quantile(self.firsts, 0.5):>9.1f} "
            f"{1e3 * quantile(self.firsts, 0.99):>8.1f}"
        )


@contextlib.asynccontextmanager
async def litellm(executable: Path, upstream: Gateway) -> AsyncIterator[Gateway]:
    """Its proxy as its pages say it is run, with one worker process, as ours has."""
    port = free_port()
    params = {
        "model": f"openai/{MODEL}",
        "api_base": f"http://{upstream.host}:{upstream.port}/v1",
        "api_key": "none",
    }
    config = {"model_list": [{"model_name": MODEL, "litellm_params": params}]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        process = await asyncio.create_subprocess_exec(
            *dies_with_us(str(executable), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)),
            env=os.environ | LITELLM,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

        async def ready() -> bool:
            if process.returncode is not None:
                raise RuntimeError(f"litellm ended with {process.returncode}; run: {executable} --config ...")
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as client:
                    return (await client.get(f"http://127.0.0.1:{port}/health/liveliness")).status_code == 200
            return False

        try:
            await until(ready, "litellm's proxy is ready", 180)
            yield Gateway("127.0.0.1", port, "", psutil.Process(process.pid))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def measure(running: Gateway, streams: int, figures: Figures, first_seed: int) -> None:
    """So many streams at once, of TOKENS each."""
    loop = asyncio.get_running_loop()

    async def one(number: int) -> Stream:
        # Their starts are spread a little, as those of people are.
        await asyncio.sleep(number * 0.01)
        body = chat(TOKENS, seed=first_seed + number)
        _, reading = await loop.create_connection(lambda: AnyStream(body), running.host, running.port)
        await reading.over
        return reading

    cpu, begun = running.cpu_seconds(), time.perf_counter()
    answers = await asyncio.gather(*map(one, range(streams)))
    figures.seconds += time.perf_counter() - begun
    figures.cpu += running.cpu_seconds() - cpu
    for answer in answers:
        if answer.first is None or not answer.done:
            raise RuntimeError(f"an answer was not whole; status {answer.status}")
        figures.tokens += answer.chunks
        figures.firsts.append(answer.first)


async def run(executable: Path, streams: int, rounds: int) -> str:
    ours, theirs = Figures(), Figures()
    async with (
        simulated(*FLAGS, "--sim.answer-tokens", "10000") as workers,
        gateway(workers) as moebius,
        litellm(executable, moebius) as peer,
    ):
        for warming in (moebius, peer):
            await measure(warming, 4, Figures(), 1)
        for number in range(rounds):
            await measure(moebius, streams, ours, 1000 * number)
            await measure(peer, streams, theirs, 1000 * number)
    return "\n".join(_table(streams, ours, theirs))


def _table(streams: int, ours: Figures, theirs: Figures) -> Sequence[str]:
    ratio = (theirs.cpu / theirs.tokens) / (ours.cpu / ours.tokens)
    added = 1e3 * (quantile(theirs.firsts, 0.5) - quantile(ours.firsts, 0.5))
    return (
        f"{streams} streams of {TOKENS} tokens, {len(ours.firsts)} requests each",
        f"{'':<26} {'CPU us/tok':>10} {'tok/s on a core':>14} {'tok/s seen':>12} {'first ms':>9} {'p99':>8}",
        ours.row("Moebius"),
        theirs.row("litellm before Moebius"),
        f"litellm's proxy costs {ratio:.1f} times our CPU a token, and adds {added:.0f} ms to the first",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--litellm", type=Path, required=True, help="the executable of an installation")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    print(asyncio.run(run(options.litellm, options.streams, options.rounds)))


if __name__ == "__main__":
    main()
