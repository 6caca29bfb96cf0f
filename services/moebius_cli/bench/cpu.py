"""Whether the load generator itself is what is slow."""

import time


class CpuShare:
    """The largest share of a core that this process took over a second or more."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used = time.process_time()
        self.peak = 0.0
        self._sampled = False

    def sample(self) -> None:
        """Call several times a second."""
        now = time.monotonic()
        if now - self._at >= 1.0:
            self._take(now)

    def finish(self) -> float:
        """The peak. Of a shorter run, its share in all."""
        if not self._sampled:
            self._take(time.monotonic())
        return self.peak

    def _take(self, now: float) -> None:
        used = time.process_time()
        self.peak = max(self.peak, (used - self._used) / (now - self._at))
        self._at, self._used, self._sampled = now, used, True
