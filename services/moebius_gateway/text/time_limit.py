"""Foreign code (a checkpoint's chat template) off the event loop, and stopped when it does not end."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _OverdueError(BaseException):
    """Raised in the midst of a function; no `except Exception` shall keep it."""


class _Job:
    """A call in some thread, which can be ended from another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._stopped = False

    def run(self, function: Callable[[], T]) -> T:
        with self._lock:
            if self._stopped:  # while it was waiting for a thread
                raise _OverdueError
            self._thread = threading.get_ident()
        try:
            return function()
        finally:
            with self._lock:
                self._thread = None

    def stop(self) -> None:
        """Raises in the thread, at its next instruction of Python, if it is still at it."""
        with self._lock:
            self._stopped = True
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(_OverdueError)
                )


async def stoppable(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls it in a thread; when it is cancelled the call ends, instead of going on without anybody."""
    job = _Job()
    running = asyncio.get_running_loop().run_in_executor(None, job.run, lambda: function(*args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        job.stop()
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise
