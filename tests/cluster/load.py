"""Streams of completions that go on until they are told to stop, each held against what it should say."""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from tests.faults.load import Prompt, Seen, stream, sure_prompts


@dataclass
class Record:
    """One stream."""

    prompt: Prompt
    seen: Seen
    started: float
    # When its pieces came, on the clock of time.monotonic().
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """Clients that send one request after the other, each on a connection of its own."""

    url: str
    model: str
    undisturbed: dict[Prompt, Seen]
    records: list[Record] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        return sum(len(record.times) for record in self.records)

    async def run(self, streams: int, stop: asyncio.Event) -> None:
        """Until `stop` is set and what was begun is answered."""
        prompts = list(self.undisturbed)
        async with new_client(self.url) as client:
            await asyncio.gather(
                *(self._one_after_the_other(client, prompts[i::streams], stop) for i in range(streams))
            )

    async def _one_after_the_other(
        self, client: httpx.AsyncClient, prompts: list[Prompt], stop: asyncio.Event
    ) -> None:
        turn = 0
        while not stop.is_set() or turn == 0:
            record = Record(prompts[turn % len(prompts)], Seen(), time.monotonic())
            self.records.append(record)
            turn += 1

            def on_chunk(record: Record = record) -> None:
                record.times.append(time.monotonic())

            try:
                record.seen = await stream(client, record.prompt.body(self.model), on_chunk)
            except httpx.HTTPError as error:
                record.seen.errors.append({"type": "connection", "message": repr(error)})
            if record.seen.errors:
                await asyncio.sleep(1)  # no storm

    def failures(self) -> list[tuple[object, ...]]:
        """Answers that are not what they should be."""
        return [
            record.seen.answer()
            for record in self.records
            if record.seen.answer() != self.undisturbed[record.prompt].answer()
        ]

    def longest_gap(self, since: float) -> float:
        """Seconds that a client waited for its next piece, or its first, after `since`."""
        gaps = [0.0]
        for record in self.records:
            times = [record.started, *record.times]
            gaps += [later - max(one, since) for one, later in pairwise(times) if later > since]
        return max(gaps)


def new_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300, connect=20), limits=limits)


async def new_load(url: str, model: str, prompts: int) -> Load:
    async with new_client(url) as client:
        return Load(url, model, dict(await sure_prompts(client, model, prompts)))
