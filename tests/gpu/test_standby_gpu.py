"""A process that stands by holds nothing of the GPU, and saves a restart what PyTorch takes to start."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.tiny import write_checkpoint
from tests.waiting import until
from tests.worker.front.worker_process import WorkerProcess, standing_by, worker

GPU = torch.cuda.is_available()
# A plan and kernels that are not there take a minute.
START_SECONDS = 240.0


def gpu_files(pid: int) -> list[str]:
    """What a process has open of the GPU: some for a mere question to the driver, more for a context."""
    links = [os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("/dev/nvidia")]


async def ready(process: WorkerProcess, restarts: int) -> int:
    """The engine's process id, once it is the one after so many restarts."""

    async def again() -> int:
        status = await process.status()
        return status.engine_pid if status.restarts == restarts and process.logged("engine ready") else 0

    await until(lambda: len(process.logged("engine ready")) == restarts + 1, "ready", START_SECONDS)
    return int(await until(again, "its id"))


async def restart(process: WorkerProcess, engine: int, restarts: int) -> tuple[int, float]:
    """Kills the engine: the next one, and the seconds until it was ready."""
    begun = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    return await ready(process, restarts), time.monotonic() - begun


async def compare(folder: Path, device: str) -> tuple[float, float]:
    """Seconds of a restart without and with a process that stood by."""
    model = write_checkpoint(folder / "model")
    on = ("--device", device)
    async with worker(model, folder / "without", *on, "--standby", "no") as process:
        engine = await ready(process, 0)
        assert not standing_by(process.process.pid, engine)
        _, without = await restart(process, engine, 1)
    flags = () if device == "cuda" else ("--standby", "yes")
    async with worker(model, folder / "with", *on, *flags) as process:
        engine = await ready(process, 0)
        await until(lambda: process.logged("standing by"), "one stands by")
        pid = standing_by(process.process.pid, engine)
        held = psutil.Process(pid).memory_full_info()
        print(
            f"stands by: {held.rss >> 20} MiB resident, {held.pss >> 20} proportional, {held.uss >> 20} alone"
        )
        assert not gpu_files(pid)
        assert bool(gpu_files(engine)) == (device == "cuda"), "this test can fail"
        after, seconds = await restart(process, engine, 1)
        assert after == pid
    print(f"SIGKILL to READY on {device}: {without:.2f} s, with one that stood by {seconds:.2f} s")
    return without, seconds


@pytest.mark.timed
@pytest.mark.timeout(600)
@pytest.mark.skipif(not GPU, reason="there is no NVIDIA GPU")
def test_a_restart_is_shorter_and_the_gpu_is_left_alone(tmp_path: Path) -> None:
    without, seconds = asyncio.run(compare(tmp_path, "cuda"))
    assert seconds < without - 1
