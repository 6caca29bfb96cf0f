"""Has the kernels of trials compiled before any is timed, on all CPUs.

By the worker's means (`jit/triton_ahead.py`): a process of its own, since nothing of a GPU may be in it,
finds out what the trials launch (`tune_launches.py`), and forks others that compile it.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from moebius_kernels.registry import Architecture
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.tuning import Compiling, Product, Report

# A product, tokens, and what `tune_trials.py` times of these; functions travel by their names.
Trial = tuple[Product, int, ExpertTiling | Tiling | Callable[..., Any]]


def compile_ahead(trials: Sequence[Trial], architecture: Architecture, report: Report) -> None:
    """All that the trials launch, into Triton's cache; what cannot be compiled is found when it is measured.
    Raises what `report` raises."""
    if not trials:
        return
    # A process that has used CUDA cannot be forked.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_compile, args=(trials, architecture, there))
    process.start()
    there.close()
    try:
        with contextlib.suppress(EOFError):
            while True:
                report(Compiling(*here.recv()))
    finally:
        # Those that it has forked end with it.
        process.kill()
        process.join()


def _compile(trials: Sequence[Trial], architecture: Architecture, connection: Connection) -> None:
    """In that process; only there Triton is needed."""
    import_module("moebius_kernels.triton.tune_launches").compile_trials(
        trials, architecture, lambda done, total: connection.send((done, total))
    )
