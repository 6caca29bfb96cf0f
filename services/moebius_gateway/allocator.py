"""Keeps glibc's allocator from holding on to memory in each thread."""

import ctypes
import sys

# From malloc.h.
_M_ARENA_MAX = -8
_ARENAS = 2


def use_few_arenas() -> None:
    """glibc gives each thread that tokenizes an arena, which keeps what the longest prompt there needed.

    With a few for all threads the process keeps that once or twice. Elsewhere than on glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
