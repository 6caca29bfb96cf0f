"""Compilations side by side: each that goes wrong costs itself alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from moebius_kernels.jit import triton_ahead
from moebius_kernels.jit.triton_ahead import compile_all
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def without_launchers(monkeypatch) -> None:
    """What is compiled here is no kernel."""
    monkeypatch.setattr(triton_ahead, "compile_launcher", lambda kernel: None)


def _leaves(path: Path) -> Callable[[], None]:
    return path.touch


def _raises() -> None:
    raise ValueError("this does not compile")


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _hangs() -> None:
    time.sleep(1000)


@pytest.mark.timed
def test_each_is_compiled_once_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    good = [tmp_path / str(number) for number in range(40)]
    jobs = [*map(_leaves, good[:20]), _raises, _hangs, *map(_leaves, good[20:]), _is_killed, *[_dies] * 8]
    told: list[int] = []
    started = time.monotonic()
    failures = compile_all(jobs, processes=4, seconds=1, done=told.append)
    assert all(path.exists() for path in good)
    # Those that went wrong are over, too.
    assert told == [*range(1, len(jobs) + 1)]
    assert sorted(failures) == [
        "ValueError: this does not compile",
        "it took more than 1 s",
        "the process that compiled it was killed by SIGKILL",
        *["the process that compiled it was killed by SIGTERM"] * 8,
    ]
    assert time.monotonic() - started < 20


def test_if_each_process_is_killed_the_rest_is_left_undone(tmp_path: Path) -> None:
    told: list[int] = []
    jobs = [*map(_leaves, (tmp_path / str(number) for number in range(10_000))), _is_killed, _is_killed]
    failures = compile_all(jobs, processes=2, seconds=5, done=told.append)
    assert told[-1] < len(jobs)
    done = len(list(tmp_path.iterdir()))
    assert len(failures) == len(jobs) - done
    assert failures.count("no process was left to compile it") == len(jobs) - told[-1]


def _has_no_room() -> None:
    raise OSError("No space left\non device")


def test_why_a_compilation_failed_is_a_line() -> None:
    assert (
        compile_all([_has_no_room] * 3, processes=2, seconds=5, done=lambda count: None)
        == ["OSError: No space left on device"] * 3
    )


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_processes_cannot_be_had_there_are_fewer(allowed: int, tmp_path: Path, monkeypatch) -> None:
    """As under a limit of a container: those that there are do not wait for what never comes."""
    begun: list[ForkProcess] = []

    def start(process: ForkProcess) -> None:
        if len(begun) == allowed:
            raise BlockingIOError("fork: resource temporarily unavailable")
        begun.append(process)
        BaseProcess.start(process)

    monkeypatch.setattr(ForkProcess, "start", start)
    jobs = [_leaves(tmp_path / str(number)) for number in range(8)]
    failures = compile_all(jobs, processes=4, seconds=5, done=lambda count: None)
    assert len(list(tmp_path.iterdir())) == len(jobs) * allowed
    assert len(failures) == len(jobs) * (1 - allowed)
    assert not any(process.is_alive() for process in begun)


_FORKS = """
import os, sys, time
from moebius_kernels.jit.triton_ahead import compile_all

def hangs():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(1000)

compile_all([hangs] * 2, processes=2, seconds=60, done=print)
"""


@pytest.mark.timed
def test_they_end_with_the_process_that_wanted_them() -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        # Its end is that of all who could write to it.
        began = time.monotonic()
        assert process.stdout.read() == ""
        # They close their files a little before they are gone.
        while any(_runs(pid) for pid in forked) and time.monotonic() - began < 10:
            time.sleep(0.05)
    assert time.monotonic() - began < 10


def _runs(pid: int) -> bool:
    """Not so if it waits for somebody to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_they_run_at_the_same_time(tmp_path: Path) -> None:
    def waits_for_all(number: int) -> None:
        (tmp_path / f"begun {number}").touch()
        # One after another, they would not be done.
        wait_for(lambda: len(list(tmp_path.glob("begun *"))) == 8)
        (tmp_path / f"done {number}").touch()

    jobs = [partial(waits_for_all, number) for number in range(8)]
    compile_all(jobs, processes=8, seconds=60, done=lambda count: None)
    assert len(list(tmp_path.glob("done *"))) == 8


def test_nothing_is_nothing_to_do() -> None:
    assert (
        compile_all([], processes=4, seconds=1, done=lambda count: pytest.fail("nothing was to be done"))
        == []
    )
