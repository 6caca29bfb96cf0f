"""Where a generation lost its worker, and how each loss ended: for metrics alone."""

import time
from types import TracebackType
from typing import Protocol

from moebius_gateway.types import GenerationError, Reason


class Ledger(Protocol):
    """What is to be told."""

    def loss_ended(self, reason: str, outcome: str) -> None: ...

    def gap(self, reason: str, seconds: float) -> None: ...


# How a loss ended: with the next token; with an error for the client, who was told that the request kills
# engines or something else; or with a client that left meanwhile.
RESUMED, FAILED, POISONED, ABANDONED = OUTCOMES = ("resumed", "failed", "poisoned", "abandoned")


class Losses:
    """Of one generation. A context manager around its life: what is open at the end has not ended well."""

    __slots__ = ("_ledger", "_open", "_quiet_since")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Reasons of the losses since the last token.
        self._open: list[str] = []
        self._quiet_since = time.monotonic()

    def lost(self, reason: str) -> None:
        self._open.append(reason)

    def delivered(self) -> None:
        """A token came: whatever was open has ended well."""
        now = time.monotonic()
        if self._open:
            self._ledger.gap(self._open[0], now - self._quiet_since)
            self._close(RESUMED)
        self._quiet_since = now

    def __enter__(self) -> "Losses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GenerationError) and error.reason is Reason.POISONED:
            self._close(POISONED)
        else:
            # A client that leaves cancels or closes it, which is no `Exception`; a defect is one.
            self._close(FAILED if isinstance(error, Exception) else ABANDONED)

    def _close(self, outcome: str) -> None:
        for reason in self._open:
            self._ledger.loss_ended(reason, outcome)
        self._open.clear()
