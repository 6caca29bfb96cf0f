"""Fallback levels of processes: real workers with the simulated engine, whose engines are killed."""

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from moebius_controller.events import What
from moebius_controller.policy import LADDER
from moebius_controller.probe import Probe
from moebius_controller.spec import WorkerSpec
from moebius_controller.types import Step, Trouble
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.controller.processes import Controlled, controlled
from tests.ports import free_port
from tests.waiting import until

TWO_DEATHS = tuple(
    replace(rung, times=2) if (rung.when, rung.step) == (Trouble.ENGINE_DEATHS, Step.NEXT_LEVEL) else rung
    for rung in LADDER
)
LEVELS = [{"name": "narrow", "settings": {"max_running": 2}}]


def sim(folder: Path, *flags: str) -> WorkerSpec:
    address = f"127.0.0.1:{free_port()}"
    argv = (
        *(sys.executable, "-m", "moebius_worker", "--engine", "sim", "--listen", address),
        *("--restart-delay", "0.1", "--fallback-levels", json.dumps(LEVELS), *flags),
    )
    return WorkerSpec("worker-0", argv, address, folder / "worker-0.log")


async def ready(probe: Probe, true: Callable[[pb.Status], bool]) -> pb.Status:
    """Waits until the worker is ready, and so."""

    async def status() -> pb.Status | None:
        found = await probe.status(2)
        return found if found is not None and found.state == pb.STATE_READY and true(found) else None

    found = await until(status, "the worker is ready")
    assert isinstance(found, pb.Status)
    return found


async def kill_engine(probe: Probe, stack: Controlled) -> None:
    """Waits until the next engine is there, and its death is known."""
    before = await ready(probe, lambda _: True)
    os.kill(before.engine_pid, signal.SIGKILL)
    await ready(probe, lambda status: status.restarts > before.restarts)


async def levelled(stack: Controlled, death: Callable[[], Awaitable[None]]) -> None:
    await death()
    assert not stack.told(What.LEVEL_SET)
    await death()
    (event,) = await stack.happened(What.LEVEL_SET)
    assert event.reason.startswith("fallback level 1: its engine died 2 times in a row")


async def test_an_engine_that_dies_again_gets_the_next_level_and_keeps_it(tmp_path: Path) -> None:
    spec = sim(tmp_path)
    probe = Probe(spec.listen)
    try:
        async with controlled(tmp_path, spec, ladder=TWO_DEATHS) as stack:
            await levelled(stack, lambda: kill_engine(probe, stack))
            # An engine that serves already is left alone, and the next one has it.
            if (await ready(probe, lambda _: True)).fallback_level == 0:
                await kill_engine(probe, stack)
            on_level = await ready(probe, lambda status: status.fallback_level == 1)
            assert (on_level.fallback_name, on_level.max_running) == ("narrow", 2)
            # So has the next process.
            os.kill(on_level.pid, signal.SIGKILL)
            await ready(probe, lambda status: status.pid != on_level.pid and status.fallback_level == 1)
            assert len(stack.told(What.LEVEL_SET)) == 1
        # The next controller remembers it, as long as the worker is the same.
        async with controlled(tmp_path, spec, ladder=TWO_DEATHS):
            await ready(probe, lambda status: status.fallback_level == 1)
    finally:
        await probe.close()
    other = sim(tmp_path, "--max-waiting", "7")
    probe = Probe(other.listen)
    try:
        async with controlled(tmp_path, other, ladder=TWO_DEATHS):
            assert (await ready(probe, lambda _: True)).fallback_level == 0
    finally:
        await probe.close()
