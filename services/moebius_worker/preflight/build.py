"""Compiles a model's kernels where there is no GPU, as for an image."""

from dataclasses import replace
from importlib.util import find_spec

from moebius_kernels.jit.cache import cache_root
from moebius_kernels.jit.triton_cache import use_directory
from moebius_kernels.registry import Architecture, Device, gather
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.runner import RunnerOptions
from moebius_worker.preflight.examine import Wanted, examination_for, triton_place
from moebius_worker.preflight.run import PreflightError, Progress, compile_ahead


def build_kernels(
    checkpoint: Checkpoint, options: RunnerOptions, architecture: Architecture, progress: Progress
) -> None:
    """Into the cache, for a GPU of this architecture: what a worker with these options launches.

    Raises CheckpointError, and PreflightError if anything was not compiled, or there was nothing to compile.
    """
    if find_spec("triton") is None:
        raise PreflightError("Triton, which compiles the kernels, is not installed here.")
    _check(architecture)
    examination = examination_for(checkpoint, Wanted(replace(options, device="cuda")), elsewhere=True)
    place = triton_place(cache_root(), Device("cuda", "any", architecture))
    try:
        use_directory(place)
    except OSError as error:
        raise PreflightError(f"Kernels cannot be kept in {place}: {error}. Set MOEBIUS_CACHE_DIR.") from error
    compiled = compile_ahead(
        replace(examination, options=examination.options | {"architecture": architecture}), progress
    )
    if compiled.reason:
        raise PreflightError(
            f"For {_name(architecture)}: {compiled}. What was compiled is kept in {place}; run this again "
            "once the cause is gone."
        )
    if not compiled.kernels:
        raise PreflightError(
            f"For {_name(architecture)} this model launches no kernel that is compiled ahead."
        )


def _check(architecture: Architecture) -> None:
    """Raises PreflightError where no kernel is for such a GPU."""
    known = {one for backend in gather().backends if backend.is_triton for one in backend.architectures}
    if architecture not in known:
        names = ", ".join(map(_name, sorted(known)))
        raise PreflightError(f"No kernel is made for {_name(architecture)}. Choose among {names}.")


def _name(architecture: Architecture) -> str:
    return "{}.{}".format(*architecture)
