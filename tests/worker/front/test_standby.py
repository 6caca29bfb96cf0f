"""A process that stands by: taken with an engine's settings, or given up. Engines are simulated."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moebius_proto.worker.v1 import engine_pb2
from moebius_worker.front import standby as standby_module
from moebius_worker.front.engine_process import EngineProcess
from moebius_worker.front.standby import LEFT_BYTES, Standby, Wanted, worth_it
from moebius_worker.settings import WorkerSettings
from tests.waiting import PATIENCE, until
from tests.worker.front.worker_process import gone, standing_by

SETTINGS = WorkerSettings(engine="sim", max_running=3)


@asynccontextmanager
async def one() -> AsyncIterator[tuple[Standby, int]]:
    """One, and its process id."""
    standby = Standby("yes")
    await standby.engine_ready(SETTINGS, "cpu")
    pid = standing_by(os.getpid(), 0)
    assert pid
    try:
        yield standby, pid
    finally:
        await standby.end()
        assert not standing_by(os.getpid(), 0)


async def ready(engine: EngineProcess) -> engine_pb2.EngineReady:
    async with asyncio.timeout(PATIENCE):
        async for frame in engine.frames():
            if frame.HasField("ready"):
                return frame.ready
    raise AssertionError("it ended")


async def end(engine: EngineProcess) -> int:
    engine.kill()
    return await engine.wait()


async def test_it_becomes_an_engine_with_the_settings_of_that_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "ANSWER_SECONDS", PATIENCE)
    async with one() as (standby, pid):
        engine = await standby.start(SETTINGS.model_copy(update={"max_running": 7}))
        assert engine.pid == pid
        assert (await ready(engine)).stats.max_running == 7
        assert engine.last_flights() == []
        assert await end(engine) == -signal.SIGKILL


async def test_it_ignores_polite_signals_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "ANSWER_SECONDS", PATIENCE)
    async with one() as (standby, pid):
        await until(lambda: "SIGTERM" in ignored(pid), "it ignores SIGTERM")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        engine = await standby.start(SETTINGS)
        assert engine.pid == pid
        await ready(engine)
        await end(engine)


def ignored(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return {number.name for number in signal.Signals if mask >> (number - 1) & 1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_does_not_answer_is_given_up_for_an_engine_that_is_started(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "ANSWER_SECONDS", 0.2)
    async with one() as (standby, pid):
        os.kill(pid, number)
        engine = await standby.start(SETTINGS)
        assert gone(pid)
        assert engine.pid != pid
        assert (await ready(engine)).stats.max_running == 3
        await end(engine)


async def test_there_is_one_at_a_time_and_another_for_one_that_died() -> None:
    async with one() as (standby, pid):
        await standby.engine_ready(SETTINGS, "cpu")
        assert standing_by(os.getpid(), 0) == pid
        os.kill(pid, signal.SIGKILL)

        async def another() -> bool:
            await standby.engine_ready(SETTINGS, "cpu")
            return standing_by(os.getpid(), 0) not in (0, pid)

        await until(another, "another")


async def test_it_is_ended_when_whoever_waits_for_its_answer_gives_up() -> None:
    async with one() as (standby, pid):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await standby.start(SETTINGS)
        assert gone(pid)


async def test_it_ends_by_itself_when_nobody_can_give_it_settings_any_more() -> None:
    started = await standby_module.start_process(SETTINGS, "--standby", stdin=asyncio.subprocess.PIPE)
    assert started.process.stdin is not None
    started.process.stdin.close()
    async with asyncio.timeout(PATIENCE):
        assert await started.process.wait() == 0
    started.connection.close()


@pytest.mark.parametrize(
    ("wanted", "device", "available", "worth"),
    [
        ("auto", "cuda", LEFT_BYTES, True),
        ("auto", "cuda:1", LEFT_BYTES, True),
        ("auto", "cuda", LEFT_BYTES - 1, False),
        ("auto", "cpu", LEFT_BYTES, False),
        ("auto", "none", LEFT_BYTES, False),
        ("yes", "cpu", 0, True),
        ("no", "cuda", LEFT_BYTES, False),
    ],
)
def test_for_whom(wanted: Wanted, device: str, available: int, worth: bool) -> None:
    assert worth_it(wanted, device, available) is worth
