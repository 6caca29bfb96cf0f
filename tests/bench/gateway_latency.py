"""What the gateway adds to the time to first token: one worker, asked directly and through the gateway.

Run: python -m tests.bench.gateway_latency [--streams 64] [--seconds 20]
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

import grpc

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub
from tests.bench.rig import Gateway, chat, gateway, machine, quantile, simulated, stream

TOKENS = 100
ITL = 0.02
# Direct requests at a time, beside those through the gateway: both see the same worker and machine.
PROBES = 16
WARM_SECONDS = 2.0
FLAGS = ("--sim.ttft", "0.05", "--sim.jitter", "0", "--max-running", "512", "--sim.answer-tokens", "10000")


class Direct:
    """A gateway's end of the protocol, and nothing else."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = WorkerStub(channel).Attach()
        # One write at a time.
        self._lock = asyncio.Lock()
        self._begun: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._over: dict[int, asyncio.Event] = {}

    async def attach(self) -> None:
        await self._call.write(pb.GatewayFrame(hello=pb.Hello(gateway_id="bench")))
        self._reader = asyncio.create_task(self._read())

    async def ask(self, handle: int) -> float:
        """Seconds to the first token."""
        sampling = pb.Sampling(temperature=1, top_p=1, repetition_penalty=1, seed=handle)
        submit = pb.Submit(handle=handle, token_ids=[5] * 40, max_tokens=TOKENS, sampling=sampling)
        self._over[handle] = asyncio.Event()
        self._begun[handle] = time.perf_counter()
        async with self._lock:
            await self._call.write(pb.GatewayFrame(submit=submit))
        await self._over[handle].wait()
        del self._over[handle]
        return self._first.pop(handle)

    async def _read(self) -> None:
        while isinstance(frame := await self._call.read(), pb.WorkerFrame):
            now = time.perf_counter()
            for delta in frame.deltas:
                if delta.handle in self._begun:
                    self._first[delta.handle] = now - self._begun.pop(delta.handle)
                if delta.finish_reason:
                    self._over[delta.handle].set()

    def close(self) -> None:
        self._reader.cancel()
        self._call.cancel()


async def sustained(
    streams: int, seconds: float, numbers: Iterator[int], ask: Callable[[int], Awaitable[float]]
) -> list[float]:
    """So many at a time, one after another; their starts are spread over the first answers."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    found: list[float] = []

    async def one(place: int) -> None:
        await asyncio.sleep(place * TOKENS * ITL / streams)
        while loop.time() < end:
            found.append(await ask(next(numbers)))

    await asyncio.gather(*map(one, range(streams)))
    return found


async def through(running: Gateway, handle: int) -> float:
    answer = await stream(running, chat(TOKENS, seed=handle))
    if answer.first is None:
        raise RuntimeError(f"no token came; status {answer.status}")
    return answer.first


async def run(streams: int, seconds: float) -> str:
    async with (
        simulated(*FLAGS, "--sim.itl", str(ITL)) as workers,
        gateway(workers) as running,
        grpc.aio.insecure_channel(workers[0]) as channel,
    ):
        direct = Direct(channel)
        await direct.attach()
        numbers = itertools.count(1)
        await sustained(streams, WARM_SECONDS, numbers, lambda handle: through(running, handle))
        own, via = await asyncio.gather(
            sustained(PROBES, seconds, numbers, direct.ask),
            sustained(streams, seconds, numbers, lambda handle: through(running, handle)),
        )
        direct.close()
    lines = [f"{streams} streams; milliseconds to first token:   median      p99"]
    table = {"worker alone": own, "through the gateway": via}
    for name, values in table.items():
        lines.append(f"{name:<40} {1e3 * quantile(values, 0.5):>10.2f} {1e3 * quantile(values, 0.99):>8.2f}")
    added = [1e3 * (quantile(via, share) - quantile(own, share)) for share in (0.5, 0.99)]
    lines.append(f"{'added':<40} {added[0]:>10.2f} {added[1]:>8.2f}   ({len(own)} and {len(via)} requests)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long")
    options = parser.parse_args()
    print(machine())
    print(asyncio.run(run(options.streams, options.seconds)))


if __name__ == "__main__":
    main()
