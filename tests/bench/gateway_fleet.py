"""A gateway over 1,000 simulated workers: how long a choice among them takes, and whether anything grows.

Run: python -m tests.bench.gateway_fleet [--workers 1000] [--rate 20] [--seconds 60]
"""

import argparse
import asyncio
import re

from tests.bench.rig import Gateway, at_rate, chat, gateway, machine, simulated, stream

TOKENS = 50
MIB = 2**20
# Of the time, for memory to settle before it is looked at first.
WARM_SHARE = 0.2
BUCKET = re.compile(r'^moebius_gateway_routing_seconds_bucket\{le="(\S+)"\} (\S+)$', re.MULTILINE)


def share_within(text: str, seconds: float) -> tuple[float, int]:
    """Of the routing decisions, what part took no longer, and how many there were."""
    counts = {float(bound): float(count) for bound, count in BUCKET.findall(text)}
    total = counts[float("inf")]
    return counts[seconds] / total, int(total)


async def run(workers: int, rate: float, seconds: float) -> str:
    flags = ("--sim.ttft", "0.05", "--sim.itl", "0.02", "--log-format", "json")
    async with (
        simulated(*flags, workers=workers) as addresses,
        gateway(addresses, "--silence-timeout", "30") as running,
    ):
        failed = 0

        async def send(i: int) -> None:
            nonlocal failed
            # Conversations of which every tenth text comes again: some have a prefix somewhere.
            answer = await stream(running, chat(TOKENS, f"Text {i % 10} " * 60, seed=i))
            failed += not answer.done

        idle_before, loop = running.cpu_seconds(), asyncio.get_running_loop()
        await asyncio.sleep(5)
        idle = (running.cpu_seconds() - idle_before) / 5
        warm = await at_rate(rate, seconds * WARM_SHARE, send)
        rss, begun, cpu = running.rss(), loop.time(), running.cpu_seconds()
        sent = await at_rate(rate, seconds, send)
        return report(
            running,
            await running.metrics(),
            workers,
            warm + sent,
            failed,
            rss,
            idle,
            (running.cpu_seconds() - cpu) / (loop.time() - begun),
        )


def report(
    running: Gateway, metrics: str, workers: int, sent: int, failed: int, rss: int, idle: float, busy: float
) -> str:
    within, decisions = share_within(metrics, 0.0002)
    faster, _ = share_within(metrics, 0.0001)
    return (
        f"{workers} workers, {sent} requests, {failed} failed; {decisions} routing decisions: "
        f"{faster:.2%} within 100 us, {within:.2%} within 200 us; "
        f"RSS {running.rss() / MIB:.0f} MiB, {(running.rss() - rss) / MIB:+.1f} MiB over the run; "
        f"CPU {idle:.0%} of a core for heartbeats alone, {busy:.0%} under load"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(machine())
    print(asyncio.run(run(options.workers, options.rate, options.seconds)))


if __name__ == "__main__":
    main()
