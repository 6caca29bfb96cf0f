"""Closed and open loops, with requests that take known times."""

import asyncio
import itertools
import random
import statistics
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from moebius_cli.bench import load as loads
from moebius_cli.bench.load import Extent, closed_loop, open_loop
from moebius_cli.bench.stream import RequestError, Stream
from tests.waiting import PATIENCE


class Requests:
    """Stands for an endpoint: each request takes `seconds`."""

    def __init__(self, seconds: float, *, fails: bool = False) -> None:
        self._seconds = seconds
        self._fails = fails
        self.begun: list[float] = []
        self.in_flight = self.peak = 0

    async def send(self) -> Stream:
        stream = Stream(time.monotonic())
        self.begun.append(stream.begun)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await asyncio.sleep(self._seconds)
        self.in_flight -= 1
        if self._fails:
            stream.error = RequestError("HTTP 503", "no worker")
        return stream


async def test_a_closed_loop_keeps_its_streams_open() -> None:
    requests = Requests(0.01)
    streams = await closed_loop(4, Extent(21, None), requests.send)
    assert len(streams) == len(requests.begun) == 21
    assert requests.peak == 4


async def test_a_closed_loop_begins_nothing_after_its_duration_and_awaits_what_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: now))
    requests = Requests(0.01)

    async def send() -> Stream:
        nonlocal now
        now += 0.25
        return await requests.send()

    streams = await closed_loop(3, Extent(None, 1.0), send)
    assert len(streams) == len(requests.begun) == 4
    assert requests.in_flight == 0
    assert requests.peak == 3


async def test_after_a_failure_a_stream_of_a_closed_loop_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "PAUSE", 0.05)
    requests = Requests(0, fails=True)
    await closed_loop(1, Extent(4, None), requests.send)
    assert min(later - earlier for earlier, later in pairwise(requests.begun)) >= 0.05


async def test_an_open_loop_waits_for_nobody() -> None:
    """No request ends before the last has begun."""
    numbers, last_begun = itertools.count(1), asyncio.Event()

    async def send() -> Stream:
        if next(numbers) == 50:
            last_begun.set()
        await last_begun.wait()
        return Stream(0.0)

    async with asyncio.timeout(PATIENCE):
        streams = await open_loop(500, Extent(50, None), send, random.Random(0))
    assert len(streams) == 50


async def test_arrivals_of_an_open_loop_are_a_poisson_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps as of an exponential distribution: mean and deviation 1/rate. In a time that only sleeps pass."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def send() -> Stream:
        return Stream(now)

    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(loads, "asyncio", SimpleNamespace(TaskGroup=asyncio.TaskGroup, sleep=sleep))
    begun: list[float] = []

    def sending() -> object:
        begun.append(now)
        return send()

    await open_loop(10.0, Extent(None, 400.0), sending, random.Random(1))  # type: ignore[arg-type]
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert len(gaps) == pytest.approx(4000, rel=0.05)
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.07)
    assert max(begun) < 400
