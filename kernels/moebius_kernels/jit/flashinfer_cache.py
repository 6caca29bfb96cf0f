"""FlashInfer's compiled kernels in our cache."""

import os
from pathlib import Path

from moebius_kernels.jit.sources import digest

# Read by FlashInfer when it is imported, and by each of its builds.
WORKSPACE, MAX_JOBS = "FLASHINFER_WORKSPACE_BASE", "MAX_JOBS"
# What the compiler takes for one of its templates for Hopper, with some to spare.
JOB_BYTES = 6 << 30


def flashinfer_directory(root: Path, versions: dict[str, str]) -> Path:
    """Where FlashInfer keeps kernels, by what compiled them; it keys them by their shapes."""
    return root / "flashinfer" / digest(versions)


def use_directory(directory: Path, *, cpus: int, memory: int) -> None:
    """For this process and those that it starts, unless the environment says something else; to be called
    before FlashInfer is imported. Builds take no more than so many CPUs and bytes of memory."""
    os.environ.setdefault(WORKSPACE, str(directory))
    os.environ.setdefault(MAX_JOBS, str(max(1, min(cpus, memory // JOB_BYTES))))
