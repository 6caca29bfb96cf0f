"""Compiles a model's kernels where there is no GPU, as for an image."""

from dataclasses import replace
from importlib.util import find_spec

from moebius_kernels.jit.cache import cache_root
from moebius_kernels.jit.triton_cache import use_directory
from moebius_kernels.registry import Architecture, Device
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.runner import RunnerOptions
from moebius_worker.preflight.examine import Wanted, examination_for, triton_place
from moebius_worker.preflight.run import PreflightError, Progress, compile_ahead


def build_kernels(
    checkpoint: Checkpoint, options: RunnerOptions, architecture: Architecture, progress: Progress
) -> None:
    """Into the cache, for a GPU of this architecture: what a worker with these options launches.

    Raises CheckpointError and PreflightError.
    """
    if find_spec("triton") is None:
        raise PreflightError("Triton, which compiles the kernels, is not installed here.")
    examination = examination_for(checkpoint, Wanted(replace(options, device="cuda")), elsewhere=True)
    place = triton_place(cache_root(), Device("cuda", "any", architecture))
    try:
        use_directory(place)
    except OSError as error:
        raise PreflightError(f"Kernels cannot be kept in {place}: {error}. Set MOEBIUS_CACHE_DIR.") from error
    compile_ahead(
        replace(examination, options=examination.options | {"architecture": architecture}), progress
    )
