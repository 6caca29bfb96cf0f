"""Processes of the preflight: started, given their task, and ended.

They import PyTorch, which takes seconds; this module does not, so that whoever is about to import it too can
start them before.
"""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Self

from moebius_common.child import dies_with_us
from moebius_kernels.jit.cache import cache_root

# Where there is none, nothing has to be compiled, and nobody may die of it.
_GPU = Path("/dev/nvidiactl")

# What a task names.
_MODEL = "moebius_worker.preflight.model"

# By the names of their programs, those that wait for a task.
Waiting = dict[str, "PreflightProcess"]


@dataclass(frozen=True)
class PreflightProcess:
    """`reports`: what it says, line by line, until it ends."""

    process: subprocess.Popen[bytes]
    reports: RawIOBase

    @classmethod
    def start(cls, program: str, *preload: str) -> Self:
        """`program`: "child" or "ahead". `preload`: modules that it imports before it has its task. Raises
        OSError."""
        reading, writing = os.pipe()
        command = dies_with_us(
            *(sys.executable, "-m", f"moebius_worker.preflight.{program}", "--fd", str(writing)),
            *("--preload", *preload),
        )
        try:
            # A session of its own: compilers that it started end with it.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(writing,), start_new_session=True
            )
        finally:
            os.close(writing)
        return cls(process, os.fdopen(reading, "rb", buffering=0))

    def give(self, task: bytes) -> None:
        """Its task, a line. It makes ready."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(task)
            self.process.stdin.flush()

    def begin(self) -> None:
        """Now it may begin."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Until it has ended by itself, if that takes no longer; whether it has."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> int:
        """Its exit status, negative for a signal; SIGKILL if it has not ended by itself."""
        if self.reports.closed:
            return self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.begin()
        self.reports.close()
        return status


def start_early(device: str) -> Waiting:
    """Both processes, if a preflight on this device (as of the settings) is certain to come: no plan is kept.
    What nobody takes has to be ended. Raises OSError."""
    kept = any((cache_root() / "plans").glob("*/plan.json"))
    if device == "cpu" or kept or not _GPU.exists():
        return {}
    return {program: PreflightProcess.start(program, _MODEL) for program in ("ahead", "child")}
