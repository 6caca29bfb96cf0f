"""Triton's compiled kernels in our cache, and how many it compiles once nobody should have to wait for it."""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moebius_kernels.jit.sources import digest

# Read by Triton whenever it looks for a kernel.
TRITON_CACHE_DIR = "TRITON_CACHE_DIR"


def triton_directory(root: Path, versions: Mapping[str, str]) -> Path:
    """Where Triton keeps kernels, by what compiled them; it keys them by their own contents."""
    return root / "triton" / digest(versions)


def use_directory(directory: Path) -> None:
    """For this process and those that it starts; to be called before Triton compiles anything."""
    directory.mkdir(parents=True, exist_ok=True)
    os.environ[TRITON_CACHE_DIR] = str(directory)


def hash_compiler() -> None:
    """What Triton does once in a process, when it looks for its first kernel: it reads itself, which takes a
    second. For a thread: the interpreter is free meanwhile."""
    if find_spec("triton") is not None:
        from triton.runtime.cache import triton_key

        triton_key()


def watch_compilations(compiled: Callable[[str], None]) -> None:
    """From now on `compiled` is told the name of each kernel that Triton compiles in this process. What it
    only reads from its cache takes no time that anybody would notice."""
    if find_spec("triton") is None:
        return
    from triton import knobs

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled(getattr(src, "name", str(src)))

    knobs.compilation.listener = listen
