"""Whose turn it is: deficit round robin over clients, in classes of priority.

Within a class each client has a queue of its own and gets as many tokens as every other that waits, however
many requests it has waiting (M. Shreedhar, G. Varghese: Efficient Fair Queueing Using Deficit Round Robin,
1995). More urgent classes go first, but a class that was passed over `PATIENCE` times goes next.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

# Tokens that a client gets in each round.
QUANTUM = 2048
PATIENCE = 8
# A sequence that does not fit lets so many others pass; then all wait until it fits.
BYPASSES = 8

T = TypeVar("T")


class Fit(Enum):
    YES = "yes"
    # Not beside what runs now: smaller ones may fit.
    TOO_LARGE = "too large"
    # The client has what it may have.
    CLIENT_FULL = "client full"


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One that waits. `cost` in tokens."""

    client: str
    priority: int
    cost: int
    item: T
    passed: int = 0


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One client's entries in one class."""

    entries: deque[Entry[T]] = field(default_factory=deque)
    deficit: int = 0


class _Ring(Generic[T]):
    """One class: clients in the order of their turns, the next one first."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow[T]] = {}
        self._order: deque[str] = deque()
        self.passed_over = 0

    def push(self, entry: Entry[T]) -> None:
        if entry.client not in self.flows:
            self.flows[entry.client] = _Flow()
            self._order.append(entry.client)
        self.flows[entry.client].entries.append(entry)

    def remove(self, entry: Entry[T]) -> None:
        self.flows[entry.client].entries.remove(entry)
        self._drop_if_empty(entry.client)

    def pop(self, fit: Callable[[Entry[T]], Fit]) -> tuple[Entry[T] | None, bool]:
        """The entry whose turn it is, or None if none may go; and whether one insists on going first."""
        stuck: set[str] = set()
        while len(stuck) < len(self._order):
            client = self._order[0]
            flow = self.flows[client]
            head = flow.entries[0]
            if client in stuck:
                self._order.rotate(-1)
                continue
            if flow.deficit < head.cost:
                # The turn is over: the next begins with more.
                flow.deficit += QUANTUM
                self._order.rotate(-1)
                continue
            match fit(head):
                case Fit.YES:
                    flow.entries.popleft()
                    flow.deficit -= head.cost
                    self._drop_if_empty(client)
                    for other in stuck & self.flows.keys():
                        self.flows[other].entries[0].passed += 1
                    return head, False
                case Fit.TOO_LARGE if head.passed >= BYPASSES:
                    return None, True
                case _:
                    stuck.add(client)
        return None, False

    def _drop_if_empty(self, client: str) -> None:
        # With it goes what is left of its deficit: nobody saves up for later.
        if not self.flows[client].entries:
            del self.flows[client]
            self._order.remove(client)


class FairQueue(Generic[T]):
    """Pops in amortised O(1) rounds for each `QUANTUM` of cost; all else is O(clients) at most."""

    def __init__(self) -> None:
        self._rings: dict[int, _Ring[T]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, entry: Entry[T]) -> None:
        ring = self._rings.get(entry.priority)
        if ring is None:
            ring = _Ring()
            self._rings = dict(sorted({**self._rings, entry.priority: ring}.items()))
        ring.push(entry)
        self._size += 1

    def remove(self, entry: Entry[T]) -> None:
        """Takes out one that is in it."""
        self._rings[entry.priority].remove(entry)
        self._size -= 1

    def pop(self, fit: Callable[[Entry[T]], Fit]) -> Entry[T] | None:
        """The entry whose turn it is, of those that fit."""
        waiting = [ring for ring in self._rings.values() if ring.flows]
        waiting.sort(key=lambda ring: ring.passed_over < PATIENCE)
        for ring in waiting:
            entry, insists = ring.pop(fit)
            if entry is not None:
                self._size -= 1
                ring.passed_over = 0
                for other in waiting:
                    other.passed_over += other is not ring
                return entry
            if insists:
                return None
        return None

    def waiting(self, priority: int) -> Mapping[str, int]:
        """How many each client has waiting that are as urgent as `priority` or more."""
        counts: dict[str, int] = {}
        for urgency, ring in self._rings.items():
            if urgency <= priority:
                for client, flow in ring.flows.items():
                    counts[client] = counts.get(client, 0) + len(flow.entries)
        return counts

    def least(self) -> tuple[Entry[T], int]:
        """The one to give up first, and how many its client has in its class; of a queue that is not empty.

        It is the newest of the client that has most waiting in the least urgent class.
        """
        ring = next(ring for ring in reversed(self._rings.values()) if ring.flows)
        flow = max(ring.flows.values(), key=lambda flow: len(flow.entries))
        return flow.entries[-1], len(flow.entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        for ring in self._rings.values():
            for flow in ring.flows.values():
                yield from flow.entries
