"""Finds the tilings of a model's products by trying them on the GPU that is here.

`tune_points.py` says what there is to measure, `tune_candidates.py` which tilings are tried, `tune_search.py`
in which order, and `tune_trials.py` tries them. Candidates are compiled side by side before any is timed.
What tries them is a process of its own (`tune_process.py`), since a candidate may take it along.
"""

import contextlib
import os
import queue
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from moebius_kernels.registry import Device
from moebius_kernels.triton import dense_tiling, expert_tiling
from moebius_kernels.triton.expert_tiling import Measurement
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.triton.tiling_tables import read_user_table, replaced, write_user_table
from moebius_kernels.triton.tune_points import points_of
from moebius_kernels.triton.tune_process import Answerer, TrialError, TrialProcess
from moebius_kernels.triton.tune_search import Entry, search, to_compile
from moebius_kernels.tuning import Compiling, Point, Report, Tuner

# Each takes memory of the device.
_MOST_COMPILERS = 16


def tune(points: Sequence[Point], device: Device, path: Path, report: Report) -> None:
    """Raises OSError if the table cannot be written."""
    with closing(measured(points, report)) as entries:
        for entry in entries:
            keep(path, device, entry)


def keep(path: Path, device: Device, entry: Entry) -> None:
    """Puts it into the user's table instead of what its shape and token count had there."""
    decodes = {"experts": expert_tiling.measurement_of, "dense": dense_tiling.measurement_of}
    found = read_user_table(path, device, decodes)
    section = "experts" if isinstance(entry, Measurement) else "dense"
    found[section] = replaced(found[section], entry)
    records = {
        "experts": map(expert_tiling.record_of_measurement, found["experts"]),
        "dense": map(dense_tiling.record_of_measurement, found["dense"]),
    }
    write_user_table(path, device, records)


def measured(points: Sequence[Point], report: Report) -> Generator[Entry]:
    """The best of each point, as soon as it is known."""
    points = [point for point in points if point.candidates]
    compile_ahead([(point, tiling) for point in points for tiling in to_compile(point)], report)
    with closing(TrialProcess(_trials)) as process:
        for point in points:
            if (entry := search(point, process.ask, report)) is not None:
                yield entry


def compile_ahead(
    kernels: Sequence[tuple[Point, ExpertTiling | Tiling | Callable[..., Any]]], report: Report
) -> None:
    """Side by side, into Triton's cache; of each point a way that `tune_trials.py` times. What cannot be
    compiled is found when it is measured."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for point, tiling in dict.fromkeys(kernels):
        waiting.put((point.product, point.tokens, tiling, False))
    total = waiting.qsize()
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        with closing(TrialProcess(_trials)) as process, contextlib.suppress(queue.Empty):
            while True:
                request = waiting.get_nowait()
                try:
                    process.ask(request)
                except TrialError:
                    pass
                finally:
                    done.put(None)

    processes = min(len(os.sched_getaffinity(0)), _MOST_COMPILERS, total)
    with ThreadPoolExecutor(max(1, processes)) as threads:
        for _ in range(processes):
            threads.submit(work)
        try:
            for number in range(total):
                report(Compiling(number, total))
                done.get()
        except BaseException:
            # Whoever compiles ends with what it has.
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            raise


def _trials() -> Answerer:
    """In a process of its own; only there Triton is needed."""
    trials: Answerer = import_module("moebius_kernels.triton.tune_trials").Trials()
    return trials


TUNERS = (Tuner(points_of, tune),)
