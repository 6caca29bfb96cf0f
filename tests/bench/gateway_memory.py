"""Does the gateway's memory grow? Many requests, a part of whose clients leave, then requests that fail.

Run: python -m tests.bench.gateway_memory [--requests 50000] [--failing 300]
"""

import argparse
import asyncio
import itertools
import random

from tests.bench.rig import Gateway, chat, gateway, machine, simulated, stream

AT_A_TIME = 64
ABORTED = 0.3
TOKENS = 12
# Requests before the first look, so that what is made once is there.
WARM = 2000
MIB = 2**20


async def many(running: Gateway, count: int) -> int:
    """Sends them; returns how many were aborted."""
    numbers, aborted = itertools.count(), 0
    draw = random.Random(0)

    async def one_after_another() -> None:
        nonlocal aborted
        while (number := next(numbers)) < count:
            leaves = draw.random() < ABORTED
            body = chat(TOKENS, f"Request {number}: {draw.random()} " * 8, seed=number)
            answer = await stream(running, body, draw.uniform(0.001, 0.02) if leaves else None)
            if leaves and not answer.done:
                aborted += 1
            elif not answer.done:
                raise RuntimeError(f"a request ended with status {answer.status}")

    await asyncio.gather(*(one_after_another() for _ in range(AT_A_TIME)))
    return aborted


async def fail(running: Gateway, count: int) -> None:
    """Refused as they are read, by the model's limits, and by the worker, in turn."""
    bodies = (
        chat(TOKENS, temperature="hot"),
        chat(TOKENS, "word " * 40_000),
        chat(TOKENS, guided_grammar="start: nosuch"),
    )
    for number in range(count):
        answer = await stream(running, bodies[number % len(bodies)])
        if answer.status < 400:
            raise RuntimeError("it should have failed")


async def run(requests: int, failing: int) -> str:
    flags = ("--sim.ttft", "0.002", "--sim.itl", "0.001", "--max-running", "128")
    async with simulated(*flags) as workers, gateway(workers) as running:
        await many(running, WARM)
        before = running.rss()
        aborted = await many(running, requests)
        between = running.rss()
        # Some first: a long prompt's buffers are kept by the allocator.
        await fail(running, 30)
        settled = running.rss()
        await fail(running, failing)
        after = running.rss()
    return (
        f"{requests} requests, {aborted} of them aborted: RSS {between / MIB:.1f} MiB, "
        f"{(between - before) / MIB:+.1f} MiB; {failing} failing requests: {(after - settled) / MIB:+.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--failing", type=int, default=300)
    options = parser.parse_args()
    print(machine())
    print(asyncio.run(run(options.requests, options.failing)))


if __name__ == "__main__":
    main()
