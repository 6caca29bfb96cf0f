"""Whether FlashInfer is here. It is imported by the first call that needs it: that takes seconds."""

import importlib.metadata
from typing import Any

DISTRIBUTION = "flashinfer-python"
# The first version whose calls are those that are made here.
OLDEST = (0, 7)
# Seconds that a build of its kernels may take; they are kept.
BUILD_SECONDS = 420.0


def required() -> None:
    """Raises ImportError, which the registry shows, if the package is not here or too old."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{DISTRIBUTION} is not installed") from None
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ImportError(f"{DISTRIBUTION} {version} is older than {'.'.join(map(str, OLDEST))}")


def not_compiled(module: Any) -> str | None:
    """Why one of FlashInfer's modules (a `JitSpec`) is not used where compiling it takes longer than it is
    worth: nobody did so before. None if it is there."""
    if module.is_compiled:
        return None
    return f"{module.name} is not compiled, which takes minutes; flashinfer-jit-cache has it"
