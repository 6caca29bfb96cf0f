"""Passive ejection: a worker that dies again and again without a token in between is tried with care."""

from dataclasses import dataclass

from moebius_common.backoff import backoff

# Deaths in a row from which on a worker gets one request at a time.
TRIAL_LOSSES = 2
# Seconds for which an incarnation is left alone then: doubled with each further death.
FIRST_EJECTION = 1.0
LONGEST_EJECTION = 30.0


@dataclass(frozen=True, slots=True)
class Health:
    """A worker's deaths under load since the last token it delivered."""

    losses: int = 0
    # On the clock of time.monotonic().
    ejected_until: float = 0.0

    @property
    def on_trial(self) -> bool:
        return self.losses >= TRIAL_LOSSES

    def lost(self, now: float) -> "Health":
        """After it died with requests."""
        losses = self.losses + 1
        if losses < TRIAL_LOSSES:
            return Health(losses)
        pause = backoff(FIRST_EJECTION, losses - TRIAL_LOSSES, LONGEST_EJECTION)
        return Health(losses, now + pause)

    def restarted(self) -> "Health":
        """After its incarnation changed: tried at once, still one request at a time if it had lost many."""
        return Health(self.losses)
