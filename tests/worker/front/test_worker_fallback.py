"""A worker on fallback levels: real processes with the simulated engine, and faults that a level removes."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.waiting import until
from tests.worker.front.worker_process import WorkerProcess, attached, submit, worker

pytestmark = pytest.mark.timed

FLAGS = ("--engine", "sim", "--restart-delay", "0.1", "--max-restart-delay", "0.3")
DIES = {"faults": [{"action": "die", "after_tokens": 3}], "ttft": 0.0, "itl": 0.005}
LEVELS = [
    {"name": "in-vain", "settings": {"max_running": 2}},
    {"name": "calm", "settings": {"sim": {"faults": []}}},
]


def annotate(path: Path, level: int) -> None:
    """As a kubelet: another file takes the place of the one before."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f'moebius.dev/fallback-level="{level}"\nmoebius.dev/fallback-reason="it \\"dies\\""\n')
    fresh.replace(path)


def flags(path: Path, sim: dict[str, object], levels: list[dict[str, object]] = LEVELS) -> tuple[str, ...]:
    return (
        *FLAGS,
        *("--sim", json.dumps(sim), "--fallback-levels", json.dumps(levels), "--level-file", str(path)),
    )


def level(status: pb.Status) -> tuple[int, str]:
    return status.fallback_level, status.fallback_name


async def generates(process: WorkerProcess) -> bool:
    """Whether it lives through a request."""
    await process.ready()
    async with attached(process) as gateway:
        return bool((await gateway.generate(submit(1, max_tokens=8))).finish_reason)


async def test_a_fault_is_gone_on_the_level_that_removes_it(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    async with worker("", tmp_path / "log", *flags(annotations, DIES)) as process:
        assert not await generates(process)
        before = await process.ready()
        assert (level(before), before.fallback_levels) == ((0, ""), 2)
        annotate(annotations, 1)
        # A ready engine is left alone.
        await asyncio.sleep(0.6)
        assert (await process.status()).incarnation == before.incarnation
        assert not await generates(process)
        assert level(await process.ready()) == (1, "in-vain")
        assert (await process.ready()).max_running == 2
        annotate(annotations, 2)
        assert not await generates(process)
        assert await generates(process)
        after = await process.ready()
        assert level(after) == (2, "calm")
        # Each level is on top of those before.
        assert after.max_running == 2
        assert await generates(process)


async def test_the_level_is_known_from_the_first_start_on(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    annotate(annotations, 2)
    metrics = ("--metrics-listen", "127.0.0.1:0")
    async with worker("", tmp_path / "log", *flags(annotations, DIES), *metrics) as process:
        assert await generates(process)
        assert level(await process.status()) == (2, "calm")
        assert len(process.logged("engine started")) == 1
        host, _, port = (process.metrics or "").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"\nmoebius_worker_fallback_level 2.0\n" in await reader.read()
        writer.close()


async def test_an_engine_that_is_not_ready_is_replaced_at_once(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    levels = [{"name": "quick", "settings": {"sim": {"start_seconds": 0.0}}}]
    slow = flags(annotations, {"start_seconds": 300.0}, levels)
    async with worker("", tmp_path / "log", *slow) as process:
        loading = await until(lambda: process.logged("engine started"), "an engine")
        await asyncio.sleep(0.5)
        assert (await process.status()).state == pb.STATE_LOADING
        annotate(annotations, 1)
        after = await process.in_state(pb.STATE_READY)
        assert level(after) == (1, "quick")
        assert not after.HasField("last_fault"), "nothing went wrong"
        assert len(process.logged("engine started")) == len(loading) + 1
        assert await generates(process)


async def test_an_engine_that_cannot_be_started_waits_for_another_level(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    levels = [{"name": "own-words", "settings": {"model": ""}}]
    wrong = flags(annotations, {}, levels)
    async with worker(tmp_path / "nowhere", tmp_path / "log", *wrong) as process:
        failed = await process.in_state(pb.STATE_FAILED)
        assert "nowhere" in failed.last_fault.message
        await asyncio.sleep(0.6)
        assert len(process.logged("engine started")) == 1
        annotate(annotations, 1)
        assert level(await process.ready()) == (1, "own-words")
        assert await generates(process)


async def test_a_long_pause_ends_with_another_level(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    pause = ("--restart-delay", "600", "--max-restart-delay", "600")
    async with worker("", tmp_path / "log", *flags(annotations, DIES), *pause) as process:
        assert not await generates(process)
        await process.in_state(pb.STATE_RESTARTING)
        annotate(annotations, 2)
        assert level(await process.in_state(pb.STATE_READY)) == (2, "calm")


@pytest.mark.parametrize(("asked", "runs"), [(7, (2, "calm")), (0, (0, ""))])
async def test_a_level_beyond_the_last_is_the_last(tmp_path: Path, asked: int, runs: tuple[int, str]) -> None:
    annotations = tmp_path / "annotations"
    annotate(annotations, asked)
    async with worker("", tmp_path / "log", *flags(annotations, {})) as process:
        assert level(await process.ready()) == runs


async def test_a_file_that_does_not_tell_leaves_the_level(tmp_path: Path) -> None:
    annotations = tmp_path / "annotations"
    annotate(annotations, 2)
    async with worker("", tmp_path / "log", *flags(annotations, {"ttft": 0.0})) as process:
        await process.ready()
        annotations.write_text('moebius.dev/fallback-level="two"\n')
        first = await process.status()
        os.kill(first.engine_pid, signal.SIGKILL)
        await until(lambda: len(process.logged("engine started")) == 2, "another engine")
        assert level(await process.ready()) == (2, "calm")


async def test_the_last_of_the_levels_that_are_there_by_default_serves_a_model(
    tiny_mixtral: Path, tmp_path: Path
) -> None:
    annotations = tmp_path / "annotations"
    async with worker(tiny_mixtral, tmp_path / "log", "--level-file", str(annotations)) as process:
        await process.ready()
        async with attached(process) as gateway:
            plain = (await gateway.generate(submit(1))).token_ids
        annotate(annotations, 3)
        os.kill((await process.status()).engine_pid, signal.SIGKILL)
        await until(lambda: len(process.logged("engine started")) == 2, "another engine")
        after = await process.ready()
        assert (level(after), after.max_running) == ((3, "small-batch"), 4)
        assert not (await process.stub.GetModel(pb.GetModelRequest())).plan.backends
        async with attached(process) as gateway:
            assert (await gateway.generate(submit(1))).token_ids == plain
