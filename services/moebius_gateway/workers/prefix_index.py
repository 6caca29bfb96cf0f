"""Which workers have probably cached which prefixes: what was last sent there. One bounded index for all."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

# Blocks remembered, of all workers together: some 50 MB.
CAPACITY = 1 << 18
# Workers remembered for a block, those that got it last.
HOLDERS = 4
# A prefix's holders are looked for at so many of its blocks, the last one first.
LOOKS = 8

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
        """By address: about how many blocks at the beginning are known there."""
        # What is remembered of a prompt is its beginning: blocks are learnt from the first one on, and an
        # earlier one is never forgotten before a later one.
        depth = bisect_left(blocks, True, key=lambda block: not self._holders(block))
        found: dict[str, int] = {}
        for count in range(depth, 0, -max(1, depth // LOOKS)):
            for incarnation in self._holders(blocks[count - 1]):
                address = self._live.get(incarnation)
                if address is not None:
                    found.setdefault(address, count)
        return found

    def _holders(self, block: int) -> Holders:
        return self._young.get(block) or self._old.get(block, ())
