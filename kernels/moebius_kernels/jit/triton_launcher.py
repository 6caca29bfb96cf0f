"""The launchers of Triton's kernels compiled ahead: C, linked against the driver's library libcuda.so.1.

Where that library is not, another of the same name takes its place: launchers only name it, and find the one
of the machine where they are loaded.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime import build

_LIBRARY = "libcuda.so.1"
# A function that each launcher calls: linkers may leave out a library of which nothing is used.
_STAND_IN = "void cuGetErrorString(void) {}"


@contextmanager
def linkable() -> Iterator[None]:
    """Meanwhile this process and those that it forks can link launchers, with a driver here or without."""
    if _has_library():
        yield
        return
    with tempfile.TemporaryDirectory() as directory, knobs.nvidia.scope():
        # Without a C compiler no launcher can be compiled either: each says so then.
        with contextlib.suppress(Exception):
            _make_stand_in(Path(directory))
        knobs.nvidia.libcuda_path = directory
        yield


def compile_launcher(kernel: Any) -> None:
    """Into Triton's cache, in a process that launches nothing: from now on it loads no launcher. Raises what
    Triton raises, such as RuntimeError without a C compiler."""
    build._load_module_from_path = lambda name, path: SimpleNamespace(launch=None)
    driver.CudaLauncher(kernel.src, kernel.metadata)


def _has_library() -> bool:
    try:
        driver.libcuda_dirs()
    except Exception:
        return False
    return True


def _make_stand_in(directory: Path) -> None:
    source = directory / "libcuda.c"
    source.write_text(_STAND_IN)
    made = build._build("libcuda", str(source), str(directory), [], [], [], [f"-Wl,-soname,{_LIBRARY}"])
    Path(made).rename(directory / _LIBRARY)
