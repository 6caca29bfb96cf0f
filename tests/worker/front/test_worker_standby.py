"""A worker with a process that stands by. Real processes."""

import asyncio
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.waiting import PATIENCE, until
from tests.worker.front.worker_process import WorkerProcess, attached, gone, standing_by, submit, worker

pytestmark = pytest.mark.timed

FLAGS = ("--standby", "yes")


async def waits(process: WorkerProcess, times: int = 1) -> tuple[int, int]:
    """The ids of the engine and of what stands by, which has imported all, once so many have stood by."""

    async def both() -> tuple[int, int] | None:
        engine = (await process.ready()).engine_pid
        pid = standing_by(process.process.pid, engine)
        return (engine, pid) if len(process.logged("standing by")) == times and pid else None

    engine, pid = await until(both, "one stands by")
    return engine, pid


async def said(process: WorkerProcess) -> list[int]:
    async with attached(process) as gateway:
        return (await gateway.generate(submit(1))).token_ids


async def test_it_becomes_the_engine_and_imports_nothing_any_more(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    levels = [{"name": "few", "settings": {"max_running": 2}}]
    annotations = tmp_path / "annotations"
    level = ("--level-file", str(annotations), "--fallback-levels", json.dumps(levels))
    model = shutil.copytree(tiny_mixtral, tmp_path / "model")
    async with worker(model, tmp_path / "log", *FLAGS, *level) as process:
        engine, next_one = await waits(process)
        text = await said(process)
        before = process.log_file.read_text()
        annotations.write_text('moebius.dev/fallback-level="1"\n')
        os.kill(engine, signal.SIGKILL)
        now, after = await waits(process, 2)
        assert now == next_one
        assert after not in (engine, next_one)
        status = await process.status()
        assert (status.engine_pid, status.restarts, status.fallback_name) == (next_one, 1, "few")
        assert status.max_running == 2
        assert await said(process) == text
        # What it says of its end counts as if it had just been started.
        (model / "config.json").unlink()
        os.kill(next_one, signal.SIGKILL)
        failed = await process.in_state(pb.STATE_FAILED)
        assert "config.json" in failed.last_fault.message
        await until(lambda: gone(after), "its end")
    during = process.log_file.read_text().removeprefix(before).partition('"engine ready"')[0]
    for module in ("torch", "triton", "moebius_kernels.dispatch", "moebius_worker.engine.serving"):
        assert re.search(rf"^import time:.* {module}$", before, re.MULTILINE), "imports are logged"
    assert '"the standby becomes the engine"' in during
    assert "import time:" not in during


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_nobody_is_left(number: signal.Signals, tmp_path: Path) -> None:
    async with worker("", tmp_path / "log", "--engine", "sim", *FLAGS) as process:
        both = await waits(process)
        process.process.send_signal(number)
        await asyncio.wait_for(process.process.wait(), PATIENCE)
        await until(lambda: all(map(gone, both)), "the end of both")


async def test_without_a_gpu_nobody_stands_by_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with worker("", tmp_path / "log", "--engine", "sim") as process:
        status = await process.ready()
        await asyncio.sleep(0.3)
        assert not standing_by(process.process.pid, status.engine_pid)
