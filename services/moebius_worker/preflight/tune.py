"""Measures tilings on the GPU that is here, for models that are served here."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from moebius_kernels.jit.cache import cache_root
from moebius_kernels.jit.triton_cache import use_directory
from moebius_kernels.tuning import Point, Report, find_tuner, tilings_path
from moebius_worker.preflight.examine import triton_place
from moebius_worker.preflight.machine import device_here


class CannotTuneError(Exception):
    """What is needed to measure tilings is not here; says what."""


def tune_here(points: Sequence[Point], report: Report) -> Path:
    """Where the tilings are kept. What is compiled is where workers find it.

    Raises CannotTuneError, and OSError for a table that cannot be written.
    """
    if not torch.cuda.is_available():
        raise CannotTuneError("PyTorch finds no NVIDIA GPU here")
    if find_spec("triton") is None:
        raise CannotTuneError("Triton, which compiles the kernels, is not installed here")
    device, root = device_here("cuda"), cache_root()
    use_directory(triton_place(root, device))
    path = tilings_path(root, device)
    find_tuner().tune(points, device, path, report)
    return path
