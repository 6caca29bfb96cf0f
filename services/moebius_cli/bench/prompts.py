"""Prompts of a given length that have nothing in common, so that no cache of prefixes helps."""

import random

# Common words, mostly one token each in the vocabularies of today.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law
"""
WORDS = tuple(_COMMON.split())


def words(count: int, rng: random.Random) -> list[str]:
    """Each round has every word once: the tokens of `count` words hardly vary, whatever the tokenizer."""
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += rng.sample(WORDS, len(WORDS))
    return drawn[:count]


class Prompts:
    """Prompts of `own` words, after `shared` words that all of them begin with. Two runs share nothing."""

    def __init__(self, shared: int, own: int) -> None:
        self._rng = random.Random()
        self._shared = words(shared, self._rng)
        self._own = own

    def next(self) -> str:
        return " ".join(self._shared + words(self._own, self._rng))
