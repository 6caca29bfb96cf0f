"""The prefix tree: full pages of keys and values, found again by the tokens that they hold."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

# The token ids of one page.
Block = tuple[int, ...]


class Node:
    """One page in the tree. The blocks on the way from the root are the text before it.

    `key` is a tuple of its own, never a view, so that a node pins no more than a page's ids.
    """

    __slots__ = ("children", "key", "page", "parent", "readers")

    def __init__(self, key: Block, page: int, parent: "Node | None") -> None:
        self.key: Final = key
        self.page: Final = page
        self.parent: Final = parent
        self.children: dict[Block, Node] = {}
        # Requests that have this page in their block table.
        self.readers = 0


class PrefixTree:
    """A radix tree with one page an edge, reader counts, and eviction of the least recently used leaf.

    A request reads a whole path from the root. So a node has at least the readers of each of its children,
    and everything below a node without readers has none either: idle nodes can all be evicted, in some
    order. That order costs nothing to keep: paths are released from their deepest node upwards, so each
    idle node stands behind its idle children in `_idle`, and the first in line is always a leaf.
    """

    def __init__(self) -> None:
        self.root: Final = Node((), -1, None)
        # Nodes without readers, the one idle for longest first.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages that nobody reads: `evict` can be called so many times."""
        return len(self._idle)

    def insert(self, parent: Node, key: Block, page: int) -> Node:
        """Adds a page with one reader, who must be reading `parent` (or it is the root)."""
        node = parent.children[key] = Node(key, page, parent)
        node.readers = 1
        return node

    def acquire(self, node: Node) -> None:
        """Adds a reader, who must be reading the node's parent (or that is the root)."""
        if not node.readers:
            del self._idle[node]
        node.readers += 1

    def release_path(self, node: Node) -> None:
        """Takes a reader off `node` and off all nodes above it."""
        for member in path(node):
            member.readers -= 1
            if not member.readers:
                self._idle[member] = None

    def evict(self) -> Node:
        """Removes the leaf that was idle for longest, and returns it. KeyError when none is idle."""
        node, _ = self._idle.popitem(last=False)
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.key]
        return node


def path(node: Node) -> Iterator[Node]:
    """`node` and the nodes above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
