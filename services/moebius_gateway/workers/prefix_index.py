"""Which workers have probably cached which prefixes: what was last sent there. One bounded index for all."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from moebius_gateway.workers.routing import AFFINITY_BLOCKS

# Blocks remembered, of all workers together: some 50 MB.
CAPACITY = 1 << 18
# Workers remembered for a block, those that got it last.
HOLDERS = 4
# A prefix's holders are looked for at its last block that is known, and at so many of the first ones: having
# more than those makes no difference to a choice.
LOOKS = 4

Holders = tuple[str, ...]


class PrefixIndex:
    """A holder is one incarnation of a worker; when that ends, nothing of it is found any more."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._generation = capacity // 2
        # Blocks that were sent since the last turn of generations, and those of the generation before.
        self._young: dict[int, Holders] = {}
        self._old: dict[int, Holders] = {}
        # Incarnation to address.
        self._live: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, incarnation: str, address: str) -> None:
        self._live[incarnation] = address

    def drop(self, incarnation: str) -> None:
        """Its entries are never found again, and leave the index as they are met or grow old."""
        self._live.pop(incarnation, None)

    def learn(self, blocks: Sequence[int], incarnation: str) -> None:
        """A prompt of these blocks was sent there."""
        for block in blocks:
            holders = self._holders(block)
            if not holders or holders[0] != incarnation:
                others = [one for one in holders if one != incarnation and one in self._live]
                holders = (incarnation, *others[: HOLDERS - 1])
            self._young[block] = holders
            self._old.pop(block, None)
        if len(self._young) >= self._generation:
            self._young, self._old = {}, self._young

    def match(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """By address: about how many blocks at the beginning are known there, for a few that have most."""
        # What is remembered of a prompt is its beginning: blocks are learnt from the first one on, and an
        # earlier one is never forgotten before a later one.
        young, old = self._young, self._old
        depth = bisect_left(blocks, True, key=lambda block: block not in young and block not in old)
        found: dict[str, int] = {}
        for count in _looks(depth):
            for incarnation in self._holders(blocks[count - 1]):
                address = self._live.get(incarnation)
                if address is not None:
                    found.setdefault(address, count)
            if len(found) >= HOLDERS:
                break
        return found

    def _holders(self, block: int) -> Holders:
        return self._young.get(block) or self._old.get(block, ())


def _looks(depth: int) -> Sequence[int]:
    """How many blocks of those that are known, the most first."""
    fewer = min(depth - 1, AFFINITY_BLOCKS)
    return (depth, *range(fewer, 0, -(fewer // LOOKS + 1))) if depth else ()
