"""Faults on demand, for tests: what an engine does when a step computes a certain token."""

import os
import signal
import time
from collections.abc import Iterable, Sequence

from moebius_worker.engine.types import Slice
from moebius_worker.settings import InjectedFault


class InjectedError(RuntimeError):
    """Raised in a step, by request of a test."""


class FaultInjector:
    def __init__(self, faults: Iterable[InjectedFault]) -> None:
        self._faults = tuple(faults)

    def check(self, slices: Sequence[Slice]) -> None:
        """Does what was asked for if the step holds one of the tokens; call it within the step."""
        for fault in self._faults:
            if any(fault.token_id in piece.token_ids for piece in slices):
                _act(fault)


def _act(fault: InjectedFault) -> None:
    match fault.action:
        case "raise":
            raise InjectedError(f"injected by --inject-faults: token {fault.token_id}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            while True:
                time.sleep(3600)
