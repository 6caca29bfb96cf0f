"""Pauses that grow with each failure in a row."""

# Doubled so often, any pause is past any limit; without a limit on the exponent a float overflows.
MAX_DOUBLINGS = 30


def backoff(first: float, doublings: int, longest: float) -> float:
    """`first` seconds, doubled so many times, but at most `longest`."""
    return min(first * 2.0 ** min(doublings, MAX_DOUBLINGS), longest)
