"""SplitMix64 (Steele, Lea, Flood 2014): the n-th number that a seed gives is a hash of seed + n * GOLDEN."""

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# The hash, round by round: the state, combined with itself shifted to the right, times a multiplier.
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def hashed(state: int) -> int:
    """An unsigned 64-bit number for any whole number."""
    state &= MASK
    for shift, multiplier in ROUNDS:
        state = ((state ^ (state >> shift)) * multiplier) & MASK
    return state
