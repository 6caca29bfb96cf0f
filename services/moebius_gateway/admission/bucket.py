"""A token bucket: so much a second, and bursts up to what it holds."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` at the time `at` (seconds, any clock); below zero after a debt."""

    capacity: float
    # Filled with so much a second.
    rate: float
    level: float
    at: float

    @classmethod
    def per_minute(cls, amount: float, now: float) -> "Bucket":
        """Full."""
        return cls(amount, amount / 60, amount, now)

    def filled(self, now: float) -> "Bucket":
        """As of `now`."""
        level = min(self.capacity, self.level + max(now - self.at, 0.0) * self.rate)
        return replace(self, level=level, at=now)

    def delay(self, amount: float, now: float) -> float:
        """Seconds until so much can be taken; 0 if it can be now.

        More than the bucket holds can be taken when it is full, and leaves a debt: it would never fit.
        """
        missing = min(amount, self.capacity) - self.filled(now).level
        return max(missing, 0.0) / self.rate

    def taken(self, amount: float, now: float) -> "Bucket":
        """After so much was taken, there or not; a negative amount is given back."""
        filled = self.filled(now)
        return replace(filled, level=min(self.capacity, filled.level - amount))

    def resized(self, amount: float, now: float) -> "Bucket":
        """With another amount a minute; what was used up stays used up."""
        used = self.capacity - self.filled(now).level
        return Bucket(amount, amount / 60, amount - used, now)
