"""The two processes that `moebius up` keeps: started again when they end, gone when they are stopped."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from moebius_cli.children import Child
from moebius_cli.errors import CliError
from tests.waiting import PATIENCE, until

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPS
HAS_A_CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    + SLEEPS
)


def child(log: Path, program: str, pids: list[int] | None = None) -> Child:
    started: list[int] = [] if pids is None else pids
    made = Child("sleeper", (sys.executable, "-c", program), log, lambda: started.append(made.pid))
    return made


async def test_it_is_started_again(tmp_path: Path) -> None:
    pids: list[int] = []
    said: list[str] = []
    sleeper = child(tmp_path / "log", SLEEPS, pids)
    await sleeper.start()
    keeping = asyncio.create_task(sleeper.keep(said.append))
    os.kill(sleeper.pid, signal.SIGKILL)
    await until(lambda: len(pids) == 2, "a second process")
    assert pids[0] != pids[1]
    assert "was killed by SIGKILL" in said[0]
    await sleeper.stop(10)
    await asyncio.wait_for(keeping, PATIENCE)
    assert not psutil.pid_exists(pids[1])


async def test_stopped_between_two_processes_it_stays_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test may stand still between the end and the stop.
    monkeypatch.setattr("moebius_cli.children._FIRST_DELAY", 10.0)
    pids: list[int] = []
    said: list[str] = []
    sleeper = child(tmp_path / "log", "raise SystemExit(7)", pids)
    await sleeper.start()
    keeping = asyncio.create_task(sleeper.keep(said.append))
    await until(lambda: said, "its end is seen")
    await sleeper.stop(10)
    await asyncio.wait_for(keeping, PATIENCE)
    assert len(pids) == 1


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    sleeper = child(tmp_path / "log", IGNORES_SIGTERM)
    await sleeper.start()
    await until(lambda: (tmp_path / "log").read_text(), "it runs")
    await asyncio.wait_for(sleeper.stop(0.2), PATIENCE)
    assert not psutil.pid_exists(sleeper.pid)


async def test_kill_takes_what_it_started_along(tmp_path: Path) -> None:
    sleeper = child(tmp_path / "log", HAS_A_CHILD)
    await sleeper.start()
    await until(lambda: (tmp_path / "log").read_text(), "it runs")
    family = psutil.Process(sleeper.pid).children(recursive=True)
    assert family
    await sleeper.kill()
    assert not any(process.is_running() and process.status() != "zombie" for process in family)


async def test_a_failed_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    sleeper = child(tmp_path / "log", "raise SystemExit('no space left')")
    await sleeper.start()
    keeping = asyncio.create_task(sleeper.keep(lambda _: None))
    await until(lambda: sleeper.restarts or not psutil.pid_exists(sleeper.pid), "it has ended")

    def refused() -> bool:
        try:
            sleeper.check()
        except CliError as error:
            return "no space left" in str(error)
        return False

    await until(refused, "check() tells it")
    await sleeper.stop(5)
    await keeping


def test_one_that_was_never_started_is_not_well(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="it said nothing"):
        child(tmp_path / "log", SLEEPS).check()


async def test_a_start_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    said: list[str] = []
    sleeper = child(tmp_path / "log", SLEEPS, pids)
    await sleeper.start()
    keeping = asyncio.create_task(sleeper.keep(said.append))

    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("too many processes")

    with monkeypatch.context() as machine:
        machine.setattr(asyncio, "create_subprocess_exec", refused)
        os.kill(sleeper.pid, signal.SIGKILL)
        await until(lambda: any("cannot be started" in line for line in said), "the failure is said")
    await until(lambda: len(pids) == 2, "a second process")
    await sleeper.stop(10)
    await asyncio.wait_for(keeping, PATIENCE)


async def test_one_that_cannot_write_its_log_is_started_all_the_same(tmp_path: Path) -> None:
    pids: list[int] = []
    logs = tmp_path / "logs"
    sleeper = child(logs / "log", SLEEPS, pids)
    await sleeper.start()
    keeping = asyncio.create_task(sleeper.keep(lambda _: None))
    shutil.rmtree(logs)
    logs.touch()
    os.kill(sleeper.pid, signal.SIGKILL)
    await until(lambda: len(pids) == 2, "a second process")
    await sleeper.stop(10)
    await asyncio.wait_for(keeping, PATIENCE)
