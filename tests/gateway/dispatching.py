"""What the tests of the gateway's worker side share: dispatchers, generations, conditions to wait for."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from moebius_common.child import dies_with_us
from moebius_gateway.types import FinishReason, Generation, ModelInfo, Sampling, Tokens
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.worker_standin import Plan, StandIn, serving, undisturbed
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SLOW = Plan(rate=50)
MODEL = ModelInfo("standin", "StandIn", "hash", 4096, 256, (2,), 0)


def generation(
    prompt: Sequence[int] = (5, 6, 7),
    *,
    seed: int = 1,
    max_tokens: int = 20,
    seconds: float = 20.0,
    stop: Sequence[int] = (),
    logprobs: int | None = None,
    model: str = "standin",
) -> Generation:
    return Generation(
        request_id=f"test-{seed}",
        model=model,
        prompt_ids=tuple(prompt),
        max_tokens=max_tokens,
        min_tokens=0,
        stop_token_ids=tuple(stop),
        sampling=Sampling(seed=seed, logprobs=logprobs),
        deadline=time.monotonic() + seconds,
    )


@dataclass
class Seen:
    """What a consumer of a stream got, as it came."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[Tokens] = field(default_factory=list)
    finish_reason: FinishReason | None = None


async def consume(dispatcher: Dispatcher, wanted: Generation, seen: Seen | None = None) -> Seen:
    seen = seen or Seen()
    async with contextlib.aclosing(dispatcher.stream(wanted)) as stream:
        async for piece in stream:
            assert seen.finish_reason is None
            seen.tokens += piece.token_ids
            seen.pieces.append(piece)
            seen.finish_reason = piece.finish_reason
    return seen


class Gateway(Dispatcher):
    """A dispatcher whose metrics can be read."""

    def __init__(self, options: DispatcherOptions) -> None:
        self.registry = CollectorRegistry()
        super().__init__(options, DispatcherMetrics(self.registry))

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"moebius_gateway_{name}", labels)
        assert value is not None, f"{name} {labels} is not exported"
        return value

    def idle(self) -> bool:
        """Nothing is left behind: no gauge, no map holds a generation."""
        waiting = self.metric("streams_waiting")
        return waiting == 0 and not any(view.in_flight for view in self.workers())


@asynccontextmanager
async def gateway(*ports: int, **options: object) -> AsyncIterator[Gateway]:
    """A started dispatcher of workers on these ports of loopback."""
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    built = Gateway(DispatcherOptions(workers=addresses, **options))  # type: ignore[arg-type]
    await built.start()
    try:
        yield built
    finally:
        await built.stop()


@asynccontextmanager
async def cluster(count: int, plan: Plan | None = None, **options: object) -> AsyncIterator["Cluster"]:
    """`count` stand-ins in this process and a dispatcher that is attached to all."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [StandIn(plan or Plan(), name=f"w{i}") for i in range(count)]
        ports = [await stack.enter_async_context(serving(worker)) for worker in workers]
        built = await stack.enter_async_context(gateway(*ports, **options))
        await until(lambda: all(view.model for view in built.workers()))
        yield Cluster(built, workers, ports)


@dataclass
class Cluster:
    gateway: Gateway
    workers: list[StandIn]
    ports: list[int]

    def busy(self) -> StandIn:
        """The worker that runs most."""
        return max(self.workers, key=lambda worker: len(worker.running))

    def submits(self) -> int:
        return sum(len(worker.submits) for worker in self.workers)


async def begin(
    it: Cluster, count: int, max_tokens: int = 30, at_least: int = 5
) -> list[tuple[Seen, asyncio.Task[Seen]]]:
    """`count` generations (seeds 0, 1, ...) in tasks, each with `at_least` tokens."""
    begun = []
    for seed in range(count):
        seen = Seen()
        wanted = generation(seed=seed, max_tokens=max_tokens)
        begun.append((seen, asyncio.create_task(consume(it.gateway, wanted, seen))))
    await until(lambda: all(len(seen.tokens) >= at_least for seen, _ in begun))
    return begun


async def finish(begun: list[tuple[Seen, asyncio.Task[Seen]]], max_tokens: int = 30) -> None:
    """All end with exactly the tokens of an undisturbed run."""
    await asyncio.gather(*(task for _, task in begun))
    for seed, (seen, _) in enumerate(begun):
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), seed, max_tokens)
        assert seen.finish_reason is FinishReason.LENGTH


def refusal(reason: int, seconds: float = 0.2) -> pb.Error:
    return pb.Error(reason=reason, message="not now", retryable=True, retry_after_ms=int(1000 * seconds))


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator["Process"]:
    """A stand-in as a process; killed at the end if it still runs."""
    child = await asyncio.create_subprocess_exec(
        *dies_with_us(sys.executable, "-m", "tests.gateway.worker_standin", *arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    try:
        address = (await child.stdout.readline()).decode().strip()
        assert address, "the stand-in did not start"
        yield Process(child, int(address.rpartition(":")[2]))
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@dataclass
class Process:
    child: asyncio.subprocess.Process
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"
