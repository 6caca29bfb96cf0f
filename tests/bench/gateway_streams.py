"""The gateway's CPU time for each streamed token, and where it goes.

Run: python -m tests.bench.gateway_streams [--streams 256] [--rate 40] [--tokens 200] [--profile]
"""

import argparse
import asyncio
import pstats
import tempfile
from pathlib import Path

from tests.bench.rig import Gateway, chat, gateway, machine, simulated, stream

TOP = 30


async def measure(running: Gateway, streams: int, tokens: int) -> str:
    await stream(running, chat(2))
    loop = asyncio.get_running_loop()
    before, begun = running.cpu_seconds(), loop.time()
    bodies = [chat(tokens, seed=seed) for seed in range(streams)]
    answers = await asyncio.gather(*(stream(running, body) for body in bodies))
    cpu, wall = running.cpu_seconds() - before, loop.time() - begun
    if broken := [answer for answer in answers if not answer.done]:
        one = broken[0]
        raise RuntimeError(f"{len(broken)} streams did not end well; one has {one.status}, {one.tail!r}")
    total = streams * tokens
    events = sum(answer.chunks for answer in answers)
    return (
        f"{streams} streams, {total} tokens in {events} events: {1e6 * cpu / total:.1f} us of CPU a token, "
        f"{1e6 * cpu / events:.1f} us an event; {total / cpu:,.0f} tokens/s on one core "
        f"({total / wall:,.0f} tokens/s came, at {cpu / wall:.0%} of a core)"
    )


async def run(streams: int, rate: float, tokens: int, profile: Path | None) -> str:
    flags = ("--sim.ttft", "0", "--sim.jitter", "0", "--sim.itl", str(1 / rate))
    places = ("--max-running", str(streams), "--max-waiting", str(streams), "--sim.kv-tokens", "1000000")
    async with (
        simulated(*flags, *places) as workers,
        gateway(workers, "--max-waiting", str(streams), profile=profile) as running,
    ):
        return await measure(running, streams, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=40.0, help="tokens a second in each stream")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--profile", action="store_true", help="show where the time goes; slows it down")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile" if options.profile else None
        print(machine())
        print(asyncio.run(run(options.streams, options.rate, options.tokens, profile)))
        if profile is not None:
            pstats.Stats(str(profile)).strip_dirs().sort_stats("tottime").print_stats(TOP)


if __name__ == "__main__":
    main()
