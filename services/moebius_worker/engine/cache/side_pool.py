"""Window pages and state snapshots: what a node of the prefix tree may have beside its page."""

from collections import OrderedDict
from dataclasses import dataclass

from moebius_worker.engine.cache.pages import PagePool
from moebius_worker.engine.cache.radix import Node
from moebius_worker.engine.types import PoolStats


@dataclass(slots=True)
class _Item:
    number: int
    readers: int
    kept: bool = False


class SidePool:
    """Numbers (of window pages, or of state slots), each free, owned by a request, or left at a node.

    One that lies at a node has readers, who keep it there. Without readers it is *idle*: it stays as long as
    the node does and nobody needs a number. Those that no reader found worth keeping go first, and among
    equals the one that was idle for longest. Unlike pages, it may go while those of the nodes below stay.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool = PagePool(size)
        self._items: dict[Node, _Item] = {}
        # The first ones that go, and the others, each in the order in which they became idle.
        self._passed: OrderedDict[Node, None] = OrderedDict()
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many `take` can give out now."""
        return self._pool.free + self._cached

    @property
    def _cached(self) -> int:
        return len(self._passed) + len(self._idle)

    def stats(self) -> PoolStats:
        return PoolStats(self._size, used=self._size - self.available, cached=self._cached)

    def __contains__(self, node: Node) -> bool:
        return node in self._items

    def number(self, node: Node) -> int:
        """KeyError when nothing lies at `node`."""
        return self._items[node].number

    def take(self) -> int:
        """A number for a request to own. KeyError when none is available."""
        if not self._pool.free:
            node, _ = (self._passed or self._idle).popitem(last=False)
            self._pool.give_back(self._items.pop(node).number)
        return self._pool.take()

    def give_back(self, number: int) -> None:
        self._pool.give_back(number)

    def leave(self, node: Node, number: int) -> None:
        """Its owner leaves `number` at `node`, as its first reader; nothing must lie there."""
        assert node not in self._items
        self._items[node] = _Item(number, readers=1)

    def hold(self, node: Node, *, keep: bool = False) -> int:
        """Adds a reader of what lies at `node`; returns the number. `keep`: it is worth keeping."""
        item = self._items[node]
        if not item.readers:
            self._leave_queue(node)
        item.readers += 1
        item.kept |= keep
        return item.number

    def let_go(self, node: Node, *, keep: bool = True) -> None:
        """Takes a reader off. `keep`: it is worth keeping."""
        item = self._items[node]
        item.readers -= 1
        item.kept |= keep
        if not item.readers:
            (self._idle if item.kept else self._passed)[node] = None

    def drop(self, node: Node) -> None:
        """Frees what lies at `node`, if anything does; nobody must be reading it."""
        item = self._items.pop(node, None)
        if item is not None:
            self._leave_queue(node)
            self._pool.give_back(item.number)

    def _leave_queue(self, node: Node) -> None:
        del (self._idle if node in self._idle else self._passed)[node]
