"""A gateway over 1,000 simulated workers: what a choice among them takes, and whether anything grows.

The gateway has one CPU for itself; the workers and the client share the others, if there are any.
Run: python -m tests.bench.gateway_fleet [--workers 1000] [--rate 20] [--seconds 60]
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from tests.bench.rig import at_rate, chat, cpus_apart, gateway, machine, quantile, simulated, stream
from tests.bench.timed_gateway import Spent

TOKENS = 50
MIB = 2**20
# Seconds.
GOAL = 200e-6
# Of the time, for memory to settle before it is looked at first.
WARM_SHARE = 0.2
# To see what heartbeats take alone.
IDLE_SECONDS = 5.0
# Memory is looked at before and after each, while no request runs.
PARTS = 4


@dataclass(frozen=True)
class Run:
    """What came out. `rss`: bytes before and after each part; `idle`, `busy`: shares of a core."""

    requests: int
    failed: int
    decisions: list[Spent]
    rss: list[int]
    idle: float
    busy: float


async def run(workers: int, rate: float, seconds: float, cpus: set[int], timings: Path) -> Run:
    flags = ("--sim.ttft", "0.05", "--sim.itl", "0.02", "--log-format", "json")
    timed = ("tests.bench.timed_gateway", str(timings))
    failed = 0
    async with (
        simulated(*flags, workers=workers) as addresses,
        gateway(addresses, "--silence-timeout", "30", module=timed, cpus=cpus) as running,
    ):

        async def send(i: int) -> None:
            nonlocal failed
            # Conversations of which every tenth text comes again: some have a prefix somewhere.
            answer = await stream(running, chat(TOKENS, f"Text {i % 10} " * 60, seed=i))
            failed += not answer.done

        at_first = running.cpu_seconds()
        await asyncio.sleep(IDLE_SECONDS)
        idle = (running.cpu_seconds() - at_first) / IDLE_SECONDS
        sent = await at_rate(rate, seconds * WARM_SHARE, send)
        rss, loop = [running.rss()], asyncio.get_running_loop()
        begun, cpu = loop.time(), running.cpu_seconds()
        for _ in range(PARTS):
            sent += await at_rate(rate, seconds / PARTS, send)
            rss.append(running.rss())
        busy = (running.cpu_seconds() - cpu) / (loop.time() - begun)
    decisions = [Spent(*one) for one in orjson.loads(timings.read_bytes())]
    return Run(sent, failed, decisions, rss, idle, busy)


def report(workers: int, it: Run) -> str:
    def line(what: str, of: Sequence[Spent], time: Callable[[Spent], float]) -> str:
        times = [time(one) for one in of]
        within = sum(one <= GOAL for one in times) / len(times)
        half, most = (f"{quantile(times, share) * 1e6:.0f} us" for share in (0.5, 0.99))
        return f"  {what}: median {half}, p99 {most}, {within:.1%} within {GOAL * 1e6:.0f} us"

    stayed = [one for one in it.decisions if not one.switches]
    left = len(it.decisions) - len(stayed)
    rss = ", ".join(f"{resident / MIB:.1f}" for resident in it.rss)
    return "\n".join(
        (
            f"{workers} workers, {it.requests} requests, {it.failed} failed; {len(it.decisions)} decisions, "
            "each from the prompt's tokens to the worker:",
            line("wall clock", it.decisions, lambda one: one.wall),
            line("CPU of its thread", it.decisions, lambda one: one.cpu),
            line(f"wall clock, without the {left} that left their CPU", stayed, lambda one: one.wall),
            f"RSS after warming up and after each quarter: {rss} MiB",
            f"CPU {it.idle:.0%} of a core for heartbeats alone, {it.busy:.0%} under load",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    ours, others = cpus_apart()
    # The claim is about the gateway: what loads it takes no time from it.
    os.sched_setaffinity(0, others)
    print(machine())
    print(f"gateway on CPU {ours}, workers and client on {others}")
    with tempfile.TemporaryDirectory() as folder:
        timings = Path(folder) / "timings.json"
        it = asyncio.run(run(options.workers, options.rate, options.seconds, ours, timings))
    print(report(options.workers, it))


if __name__ == "__main__":
    main()
