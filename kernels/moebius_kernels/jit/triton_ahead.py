"""Triton kernels compiled before anybody launches them, side by side, for a GPU that need not be here.

On the device "meta" a launch compiles and computes nothing. So a model of sizes without numbers says which
kernels it needs: `collected` notes them, `compile_all` compiles them into Triton's cache.
"""

import contextlib
import ctypes
import gc
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moebius_common.exit_reason import exit_reason
from moebius_kernels.jit.triton_launcher import compile_launcher, linkable
from moebius_kernels.registry import Architecture

# Compiles one kernel into the cache, or finds it there.
Compilation = Callable[[], Any]

_WARP = 32
# A number of a compilation, as it travels through a pipe, whose reads and writes of so few bytes are whole.
_NUMBER = struct.Struct("=I")
# So many bytes of a report do, too.
_REPORT_BYTES = 1000
_PR_SET_PDEATHSIG = 1


class _AbsentDriver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, architecture: Architecture) -> None:
        major, minor = architecture
        self._target = GPUTarget("cuda", 10 * major + minor, _WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Notes(Executor):
    """Does nothing of what it is given."""

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.compilations.append(function)
        done: Future[Any] = Future()
        done.set_result(None)
        return done


def pretend(architecture: Architecture) -> None:
    """From now on this process compiles for such a GPU, and can launch nothing."""
    driver.set_active(_AbsentDriver(architecture))


@contextmanager
def collected() -> Iterator[list[Compilation]]:
    """Notes each kernel once that is launched on the device "meta" meanwhile, and compiles none."""
    notes = _Notes()
    with triton.AsyncCompileMode(notes):
        yield notes.compilations


def compile_all(
    compilations: Sequence[Compilation], processes: int, seconds: int, done: Callable[[int], None]
) -> list[str]:
    """In processes forked from this one, in whose memory no GPU may have a part. `done` is told how many are
    over. Where no more processes can be had, there are fewer; without any, nothing is compiled.

    One that raises, crashes or takes more than so many seconds is passed over: whoever launches the kernel
    will meet that again. A process that does not survive is replaced, but not one that was killed: where
    memory is short, fewer need less. Returns why, for each that was not compiled.
    """
    context = get_context("fork")
    numbers, given = os.pipe()
    reports, reporting = os.pipe()
    workers: list[ForkProcess] = []
    with linkable():
        with contextlib.suppress(OSError):
            for _ in range(min(processes, len(compilations))):
                worker = context.Process(
                    target=_keep_working, args=(compilations, numbers, reporting, seconds, (given, reports))
                )
                worker.start()
                workers.append(worker)
        os.close(reporting)
        os.close(numbers)
        # Larger steps, which come last, have kernels that take longer: one of these should not be the last.
        with contextlib.suppress(BrokenPipeError), os.fdopen(given, "wb") as giving:
            giving.writelines(map(_NUMBER.pack, reversed(range(len(compilations)))))
        finished, failures = _listen(reports, done)
        for worker in workers:
            worker.join()
    return failures + ["no process was left to compile it"] * (len(compilations) - finished)


def _listen(reports: int, done: Callable[[int], None]) -> tuple[int, list[str]]:
    """How many compilations were over when nobody was left to report any, and why some failed."""
    finished = 0
    failures: list[str] = []
    with os.fdopen(reports, encoding="utf-8", errors="replace") as reading:
        for line in reading:
            finished += 1
            if reason := line.strip():
                failures.append(reason)
            done(finished)
    return finished, failures


def _keep_working(
    compilations: Sequence[Compilation], numbers: int, reporting: int, seconds: int, others: Sequence[int]
) -> None:
    """In a process of its own, and in another after a compilation that it did not survive."""
    # The ends of pipes that are not its own would keep them open.
    for descriptor in others:
        os.close(descriptor)
    # Compilers leave garbage; what is there by now is none, and should not be copied by looking.
    gc.freeze()
    gc.enable()
    _end_with_parent()
    # Where another cannot be had, this one is left.
    with contextlib.suppress(OSError):
        while worker := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            if code >= 0:
                return
            _report(reporting, _epitaph(code, seconds))
            if code == -signal.SIGKILL:
                return
        _end_with_parent()
    _work(compilations, numbers, reporting, seconds)


def _end_with_parent() -> None:
    """Nobody wants its kernels once the process is gone that forked it, and another may need the CPUs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _work(compilations: Sequence[Compilation], numbers: int, reporting: int, seconds: int) -> None:
    # A compiler cannot be interrupted in any other way.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while number := os.read(numbers, _NUMBER.size):
        signal.alarm(seconds)
        failure = _failure(compilations[_NUMBER.unpack(number)[0]])
        signal.alarm(0)
        _report(reporting, failure)


def _failure(compilation: Compilation) -> str:
    """Compiles the kernel and what launches it; why that failed, empty if it did not."""
    try:
        compile_launcher(compilation())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _epitaph(code: int, seconds: int) -> str:
    if code == -signal.SIGALRM:
        return f"it took more than {seconds} s"
    return f"the process that compiled it {exit_reason(code)}"


def _report(reporting: int, failure: str) -> None:
    """That a compilation is over: a line, which is empty if nothing failed."""
    os.write(reporting, " ".join(failure.split()).encode()[:_REPORT_BYTES] + b"\n")
