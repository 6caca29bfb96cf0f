"""What a start spent its time on."""

import time
from collections.abc import Callable

# Phases that took less are told together.
_LEAST_SECONDS = 0.1


class Phases:
    """Seconds of each phase of a start, as `clock` has them. A phase that comes again goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._phase, self._begun = "", clock()

    def begin(self, phase: str) -> None:
        """In the words of `Progress`: what counts within a phase comes after a comma."""
        now = self._clock()
        if self._phase:
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._begun
        self._phase, self._begun = phase.partition(",")[0], now

    def seconds(self) -> dict[str, float]:
        """Until now, in the order in which they began; "rest" is what was short."""
        self.begin("")
        long = {phase: round(spent, 2) for phase, spent in self._spent.items() if spent >= _LEAST_SECONDS}
        rest = sum(spent for phase, spent in self._spent.items() if phase not in long)
        return long | {"rest": round(rest, 2)}
