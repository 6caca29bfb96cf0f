"""How long sequences are, how long they take, and how long it takes until it is one's turn."""

from collections.abc import Iterable
from dataclasses import dataclass

# Of the newest observation, so much counts in the means.
WEIGHT = 0.1
# Before anything was observed.
FIRST_LENGTH = 256.0


@dataclass(frozen=True, slots=True)
class Experience:
    """Means over the sequences of one model that ended, the newest counting most."""

    # Generated tokens.
    length: float = FIRST_LENGTH
    # Seconds from admission to the end; None before the first.
    seconds: float | None = None

    def after(self, length: int, seconds: float) -> "Experience":
        """With one more that ended well."""
        mean = seconds if self.seconds is None else self.seconds + WEIGHT * (seconds - self.seconds)
        return Experience(self.length + WEIGHT * (length - self.length), mean)

    def cost(self, prompt: int, max_tokens: int) -> int:
        """Tokens of KV cache that a sequence will take.

        What it may generate at most says little: by default that is all that the context leaves.
        """
        return prompt + min(max_tokens, round(self.length))


def ahead(own: int, others: Iterable[int]) -> int:
    """Of those that wait, how many come before one more of a client that has `own` waiting.

    `others`: how many each other client has. Turns go round, so that nobody's count for more than one's own.
    """
    return own + sum(min(count, own + 1) for count in others)


def wait(before: int, running: int, experience: Experience) -> float:
    """Seconds until a place is free for one that has so many before it; 0 if nothing tells."""
    if experience.seconds is None or not running:
        return 0.0
    # One of those that run ends every `seconds / running`.
    return (before + 1) * experience.seconds / running
