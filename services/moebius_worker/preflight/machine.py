"""What the gates need of a device: waiting, timing, CUDA graphs, and its error state."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from moebius_kernels.launch import latched_error
from moebius_kernels.registry import Device
from moebius_worker.engine.cuda_graph import capture_graph

# Calls that are timed: until this much time has passed, at least and at most so many.
_TIMED_SECONDS = 0.005
_TIMED_CALLS = range(3, 12)

# As PyTorch, the driver and Triton say it, and as cuBLAS does.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")

_DRIVER = Path("/proc/driver/nvidia/version")


class CaptureError(Exception):
    """Nothing that a candidate did could be captured, or the capture did not end well."""


class Machine(Protocol):
    # Whether steps of the engine become CUDA graphs here.
    captures: bool

    def synchronise(self) -> None:
        """Waits for all work. Raises RuntimeError for work that failed."""
        ...

    def latched_error(self) -> str | None:
        """The error state that somebody left, which is cleared if that is possible."""
        ...

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays `function`, and its result, which each replay writes anew. Raises what it raises."""
        ...

    def microseconds(self, function: Callable[[], Any], enough: float) -> float:
        """The median of several calls; if a call takes more than `enough`, that is all that is to be known,
        and no more are made."""
        ...

    def healthy(self) -> bool:
        """Whether innocent work still succeeds."""
        ...


class Host:
    """A CPU."""

    captures = False

    def synchronise(self) -> None:
        pass

    def latched_error(self) -> str | None:
        return None

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        raise CaptureError("a CPU has no graphs")

    def microseconds(self, function: Callable[[], Any], enough: float) -> float:
        def once() -> float:
            started = time.perf_counter()
            function()
            return (time.perf_counter() - started) * 1e6

        return _median(once, enough)

    def healthy(self) -> bool:
        return True


class Cuda:
    """The current CUDA device."""

    captures = True

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        # For all candidates' graphs, of which none outlives its candidate.
        self._pool = torch.cuda.graph_pool_handle()
        # Does nothing but stay in the pool: PyTorch would not take one again that was without graphs.
        self._keeper: torch.cuda.CUDAGraph | None = None

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def latched_error(self) -> str | None:
        return latched_error(forget=True)

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        if self._keeper is None:
            self._keeper, _ = self._captured(lambda: torch.zeros(1, device="cuda"))
        graph, result = self._captured(function)
        return graph.replay, result

    def _captured(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        try:
            return capture_graph(function, self._stream, self._pool)
        except BaseException:
            # PyTorch may leave the pool as if the capture went on, and would refuse it to the next.
            self._pool, self._keeper = torch.cuda.graph_pool_handle(), None
            raise

    def microseconds(self, function: Callable[[], Any], enough: float) -> float:
        def once() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3

        return _median(once, enough)

    def healthy(self) -> bool:
        try:
            ones = torch.ones(32, device="cuda")
            replay, total = self.capture(lambda: ones * 2)
            replay()
            return bool((total == 2).all()) and latched_error() is None
        except RuntimeError:
            return False


def ran_out(error: BaseException) -> bool:
    """Whether the error is that a GPU's memory ran out, or came of that."""
    return any(words in str(cause) for cause in _causes(error) for words in _OUT_OF_MEMORY)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those before it: the end of a capture that failed hides why it did."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def device_here(kind: str) -> Device:
    """The device that PyTorch uses now."""
    if kind != "cuda":
        return Device(kind, "CPU")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    architecture = (properties.major, properties.minor)
    return Device("cuda", properties.name, architecture, _driver())


def _median(once: Callable[[], float], enough: float) -> float:
    if (first := once()) > enough:
        return first
    times: list[float] = []
    while len(times) < _TIMED_CALLS.start or (
        sum(times) < _TIMED_SECONDS * 1e6 and len(times) < _TIMED_CALLS.stop
    ):
        times.append(once())
    return statistics.median(times)


def _driver() -> str:
    """The version of NVIDIA's driver."""
    try:
        return _DRIVER.read_text().partition("Kernel Module")[2].split()[0]
    except (OSError, IndexError):
        return "unknown"
