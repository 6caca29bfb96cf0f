"""The first minute of an engine that follows one whose device failed: it waits for each of its operations.

Work on a GPU fails after it was asked for, and a CUDA graph is one launch for hundreds of kernels: what was
noted last is not what failed. While each operation is waited for, and none is replayed, it is.
"""

import math
import time
from collections.abc import Callable

import structlog

from moebius_kernels.launch import wait_for_device

# Seconds beyond those that were asked for: the front, which judges by its own clock, begins to count later.
_LONGER = 10.0

log = structlog.get_logger(__name__)


class Probation:
    """From its making on, and for `seconds` of serving. `synchronise`: waits for the device."""

    def __init__(self, seconds: float, synchronise: Callable[[], None] = wait_for_device) -> None:
        self._seconds = seconds
        self._synchronise = synchronise
        self._end = math.inf

    def serve(self) -> None:
        """The engine is ready."""
        self._end = time.monotonic() + self._seconds + _LONGER

    def lasts(self) -> bool:
        if self._end > 0 and time.monotonic() >= self._end:
            self._end = 0.0
            log.info("the probation is over: operations are no longer waited for")
        return self._end > 0

    def wait(self) -> bool:
        """Waits for what has been launched, as long as the probation lasts; whether it does. Raises
        RuntimeError for work that failed."""
        if not self.lasts():
            return False
        self._synchronise()
        return True
