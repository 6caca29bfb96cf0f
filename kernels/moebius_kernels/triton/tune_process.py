"""Processes that answer requests one after another, and that may die of any of them."""

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from moebius_common.exit_reason import exit_reason

# A request that takes longer hangs: it compiles, and makes weights at most.
SECONDS = 180.0
_WORDS = 200


class TrialError(Exception):
    """A request came to nothing; says why."""


class Answerer(Protocol):
    def __call__(self, request: Any) -> Any: ...

    def well(self) -> bool:
        """Whether it can answer more after a request that raised."""
        ...


class TrialProcess:
    """`make`, a function of a module, is called in the process; it is started when first asked, and again
    after it has ended."""

    def __init__(self, make: Callable[[], Answerer], seconds: float = SECONDS) -> None:
        self._make, self._seconds = make, seconds
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def ask(self, request: Any) -> Any:
        """Raises TrialError."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
            if not self._connection.poll(self._seconds):
                self.close()
                raise TrialError(f"took more than {self._seconds:.0f} s")
            answer, wrong, well = self._connection.recv()
        except (EOFError, OSError):
            assert self._process is not None
            self._process.join(1.0)
            status = self._process.exitcode
            self.close()
            raise TrialError(f"the process {exit_reason(status or 0)}") from None
        if not well:
            self.close()
        if wrong is not None:
            raise TrialError(wrong)
        return answer

    def close(self) -> None:
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _start(self) -> None:
        # A process that has used CUDA cannot be forked.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._make), daemon=True)
        self._process.start()
        other.close()


def _serve(connection: Connection, make: Callable[[], Answerer]) -> None:
    """Ends when nobody is there to ask."""
    answerer: Answerer | None = None
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            request = connection.recv()
            try:
                answerer = answerer or make()
                connection.send((answerer(request), None, True))
            except Exception as error:
                connection.send((None, _in_words(error), answerer is not None and answerer.well()))


def _in_words(error: BaseException) -> str:
    """Of what it all came from: the rest says where, at length."""
    while error.__cause__ is not None:
        error = error.__cause__
    # A LaunchError has one; its class comes with PyTorch, which not all that is asked needs.
    text = getattr(error, "cause", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:_WORDS]
