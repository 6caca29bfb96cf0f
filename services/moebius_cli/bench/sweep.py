"""A sweep: level after level, each warmed, loaded and measured."""

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from moebius_cli.bench import load as loads
from moebius_cli.bench.connections import Connections
from moebius_cli.bench.cpu import CpuShare
from moebius_cli.bench.endpoint import Endpoint, Lengths
from moebius_cli.bench.measure import measure
from moebius_cli.bench.prompts import Prompts
from moebius_cli.bench.result import Level, Load, Settings
from moebius_cli.bench.stream import Stream, Tally, ask

WARM_TOKENS = 16
# Of an open loop there is no number of streams to warm: so many seconds of its arrivals, at once.
WARM_SECONDS = 1.0
LOOK_SECONDS = 0.25

# Called several times a second: the load, seconds since its begin (None: it is being warmed), what went on.
Watch = Callable[[Load, float | None, Tally], None]


@dataclass(frozen=True)
class Sweep:
    connections: Connections
    endpoint: Endpoint
    settings: Settings
    # Seconds after which a request is given up.
    limit: float
    watch: Watch

    async def levels(self, wanted: Sequence[Load]) -> AsyncGenerator[Level]:
        prompts = self._prompts()
        for load in wanted:
            yield await self._level(load, prompts)

    def _prompts(self) -> Prompts:
        lengths = self.endpoint.lengths or Lengths()
        words = lengths.words(self.settings.input_tokens)
        shared = min(words - 1, round(self.settings.shared_prefix / lengths.per_word))
        return Prompts(shared, words - shared)

    async def _level(self, load: Load, prompts: Prompts) -> Level:
        await self._warm(load, prompts)
        with _sparing_garbage():
            return await self._measured(load, prompts)

    async def _measured(self, load: Load, prompts: Prompts) -> Level:
        settings, tally, cpu = self.settings, Tally(), CpuShare()
        begun = time.monotonic()

        def look() -> None:
            cpu.sample()
            self.watch(load, time.monotonic() - begun, tally)

        async def send() -> Stream:
            return await self._ask(prompts, settings.output_tokens, tally)

        async with _repeated(look):
            streams = await loads.run(load, extent(load, settings), send)
        end = max(stream.ended for stream in streams)
        if settings.duration is not None:
            end = begun + settings.duration
        return measure(load, streams, settings.output_tokens, (begun, end), cpu.finish())

    async def _warm(self, load: Load, prompts: Prompts) -> None:
        """As many streams as the level has, short ones: its batches, its connections, the shared prefix."""
        count = max(1, round(load.value * (1 if load.kind == "concurrency" else WARM_SECONDS)))
        tokens, tally = min(WARM_TOKENS, self.settings.output_tokens), Tally()
        async with _repeated(lambda: self.watch(load, None, tally)):
            await asyncio.gather(*(self._ask(prompts, tokens, tally) for _ in range(count)))

    async def _ask(self, prompts: Prompts, output_tokens: int, tally: Tally) -> Stream:
        body = self.endpoint.dialect.body(self.endpoint.model, prompts.next(), output_tokens)
        async with self.connections.one() as client:
            return await ask(client, body, self.limit, tally)


def extent(load: Load, settings: Settings) -> loads.Extent:
    """Of a level; each stream of a closed loop has at least one request."""
    requests = settings.requests
    if requests is not None and load.kind == "concurrency":
        requests = max(requests, int(load.value))
    return loads.Extent(requests, settings.duration)


@contextmanager
def _sparing_garbage() -> Iterator[None]:
    """A full collection walks all that is there, and every stream would seem to pause."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def _repeated(look: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `look` now and again, and once at the end."""

    async def loop() -> None:
        while True:
            look()
            await asyncio.sleep(LOOK_SECONDS)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        task.cancel()
        look()
