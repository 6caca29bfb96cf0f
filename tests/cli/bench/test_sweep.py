"""What surrounds the load of a level."""

import asyncio
import gc

import httpx

from moebius_cli.bench.connections import Connections
from moebius_cli.bench.endpoint import Dialect, Endpoint
from moebius_cli.bench.load import Extent
from moebius_cli.bench.result import Load, Settings
from moebius_cli.bench.stream import Tally
from moebius_cli.bench.sweep import Sweep, extent
from tests.cli.bench.scripted import scripted


def test_garbage_of_before_is_not_looked_at_during_a_load() -> None:
    frozen: dict[bool, int] = {}

    def watch(load: Load, seconds: float | None, tally: Tally) -> None:
        frozen[seconds is None] = gc.get_freeze_count()

    async def run(url: str) -> None:
        async with Connections(httpx.URL(url + "/v1"), None) as connections:
            endpoint = Endpoint("clerk", Dialect(), None)
            sweep = Sweep(connections, endpoint, Settings(8, 2, 0, 2, None), 30.0, watch)
            assert [level.completed async for level in sweep.levels([Load("concurrency", 1)])] == [2]

    with scripted() as endpoint:
        asyncio.run(run(endpoint.url))
    # By whether the level was being warmed.
    assert frozen[True] == 0
    assert frozen[False] > 1000
    assert gc.get_freeze_count() == 0


def test_each_stream_has_a_request() -> None:
    settings = Settings(8, 2, 0, 5, None)
    assert extent(Load("concurrency", 4), settings) == Extent(5, None)
    assert extent(Load("concurrency", 8), settings) == Extent(8, None)
    assert extent(Load("rate", 8), settings) == Extent(5, None)
    assert extent(Load("concurrency", 8), Settings(8, 2, 0, None, 3.0)) == Extent(None, 3.0)
