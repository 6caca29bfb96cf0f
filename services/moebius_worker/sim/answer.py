"""What a simulated model says: a function of seed and position, so that a replay elsewhere can be checked."""

from collections.abc import Sequence
from hashlib import blake2b


def draw(seed: int, position: int, stream: bytes = b"token") -> int:
    """64 random bits, the same everywhere."""
    data = b"%d %d" % (seed, position)
    return int.from_bytes(blake2b(data, digest_size=8, person=stream).digest(), "little")


def answer_length(seed: int, typical: int) -> int:
    """Tokens before the end of text: from a half of `typical` to one and a half, at least one."""
    return max(1, typical // 2 + draw(seed, 0, b"length") % (typical + 1))


def word_at(seed: int, position: int, words: Sequence[int]) -> int:
    return words[draw(seed, position) % len(words)]
