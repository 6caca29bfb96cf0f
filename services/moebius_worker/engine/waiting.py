"""The requests that wait to be admitted."""

import math
from bisect import insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from moebius_worker.engine.request_state import RequestState


class WaitingRequests:
    """In the order of their ranks."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []
        # None has an earlier deadline.
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def first(self, count: int) -> list[RequestState]:
        return list(islice(self._states, count))

    def add(self, state: RequestState) -> None:
        insort(self._states, state, key=attrgetter("rank"))
        self._next_deadline = min(self._next_deadline, state.latest_start)

    def remove(self, state: RequestState) -> None:
        self._states.remove(state)

    def late(self, now: float) -> list[RequestState]:
        """Those whose deadlines have passed, save those that have begun."""
        if now < self._next_deadline:
            return []
        late = [state for state in self._states if state.latest_start <= now]
        self._next_deadline = min(
            (state.latest_start for state in self._states if state.latest_start > now), default=math.inf
        )
        return late
