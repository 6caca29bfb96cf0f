"""Figures of the whole stack with the demo model: decode rate at 1 and 8 streams, how long a death is felt.

Run: python -m tests.bench.stack_figures   (on an otherwise idle machine; prints the load with the figures)
"""

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from moebius_worker.demo import demo_model
from tests.faults.load import stream
from tests.stack import Stack, stack
from tests.waiting import until

QUESTION = "Write a long story about a lighthouse keeper and a storm."


def body(model: str, i: int, max_tokens: int) -> dict[str, object]:
    prompt = f"<|im_start|>user\n{QUESTION} Part {i}.<|im_end|>\n<|im_start|>assistant\n"
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def decode_rate(client: httpx.AsyncClient, model: str, streams: int, max_tokens: int = 96) -> float:
    """Tokens per second over all streams, from the moment when each has its first."""
    times: list[float] = []

    async def one(i: int) -> None:
        first = True

        def on_chunk() -> None:
            nonlocal first
            if not first:
                times.append(time.monotonic())
            first = False

        await stream(client, body(model, i, max_tokens), on_chunk)

    await asyncio.gather(*map(one, range(streams)))
    # The middle half: all streams run, none has ended.
    middle = sorted(times)[len(times) // 4 : 3 * len(times) // 4]
    return (len(middle) - 1) / (middle[-1] - middle[0])


async def felt_death(running: Stack, client: httpx.AsyncClient, model: str, victim: str) -> float:
    """Seconds from `kill -9` of the process that serves a stream to the stream's next token."""
    killed, felt = 0.0, 0.0
    arrived: list[float] = []

    async def kill() -> None:
        nonlocal killed
        await until(lambda: len(arrived) >= 20, "twenty tokens")
        worker = max((await running.view()).workers, key=lambda worker: worker.running)
        pid = getattr(worker, victim)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    killer = asyncio.create_task(kill())
    seen = await stream(client, body(model, 0, 160), lambda: arrived.append(time.monotonic()))
    await killer
    assert seen.done, seen.errors
    # What was on its way when the signal came still arrives: the pause is the longest gap after it.
    after = [killed, *(t for t in arrived if t > killed)]
    felt = max(b - a for a, b in itertools.pairwise(after))
    await until(lambda: _ready(running), "all workers are ready again", 120)
    return felt


async def _ready(running: Stack) -> bool:
    return all(worker.state == "READY" for worker in (await running.view()).workers)


async def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
    for workers in (2, 1):
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            async with (
                stack(demo_model(), Path(folder), workers=workers) as running,
                running.client() as client,
            ):
                print(f"{workers} worker(s): ready in {time.monotonic() - started:.1f} s", flush=True)
                model = await running.model()
                for streams in (1, 8):
                    rate = await decode_rate(client, model, streams)
                    print(f"{workers} worker(s), {streams} stream(s): {rate:.1f} tokens/s", flush=True)
                for victim, name in (("engine_pid", "engine"), ("pid", "worker")):
                    felt = await felt_death(running, client, model, victim)
                    print(
                        f"{workers} worker(s), kill -9 of the {name}: {felt:.2f} s without a token",
                        flush=True,
                    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
