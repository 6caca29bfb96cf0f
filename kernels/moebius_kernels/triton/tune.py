"""Finds the tilings of a model's products by trying them on the GPU that is here.

`tune_points.py` says what there is to measure, `tune_candidates.py` which tilings are tried, `tune_search.py`
in which order, and `tune_trials.py` tries them. `tune_ahead.py` has all compiled before any is timed. What
tries them is a process of its own (`tune_process.py`), since a candidate may take it along.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path

from moebius_kernels.registry import Architecture, Device
from moebius_kernels.triton import dense_tiling, expert_tiling
from moebius_kernels.triton.expert_tiling import Measurement
from moebius_kernels.triton.tiling_tables import read_user_table, replaced, write_user_table
from moebius_kernels.triton.tune_ahead import compile_ahead
from moebius_kernels.triton.tune_points import points_of
from moebius_kernels.triton.tune_process import Answerer, TrialProcess
from moebius_kernels.triton.tune_search import Entry, search, to_compile
from moebius_kernels.tuning import Point, Report, Tuner


def tune(points: Sequence[Point], device: Device, path: Path, report: Report) -> None:
    """Raises OSError if the table cannot be written."""
    assert device.architecture is not None
    with closing(measured(points, device.architecture, report)) as entries:
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


def measured(points: Sequence[Point], architecture: Architecture, report: Report) -> Generator[Entry]:
    """The best of each point on the GPU that is here, of such an architecture, as soon as it is known."""
    points = [point for point in points if point.candidates]
    tried = [(point.product, point.tokens, tiling) for point in points for tiling in to_compile(point)]
    compile_ahead(tried, architecture, report)
    with closing(TrialProcess(_trials)) as process:
        for point in points:
            if (entry := search(point, process.ask, report)) is not None:
                yield entry


def _trials() -> Answerer:
    """In a process of its own; only there Triton is needed."""
    trials: Answerer = import_module("moebius_kernels.triton.tune_trials").Trials()
    return trials


TUNERS = (Tuner(points_of, tune),)
