"""Who reads and who writes which page: block tables over the page pool and the prefix tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moebius_worker.engine.cache.pages import PagePool
from moebius_worker.engine.cache.radix import Block, Node, PrefixTree
from moebius_worker.engine.types import CacheStats


@dataclass(eq=False, slots=True)
class BlockTable:
    """One request's pages in the order of its positions. Changed by `KVCache` alone.

    The first `shared` pages are the tree's, on the path that ends in `node`; they are full and read only.
    The pages after them are the request's own, the only ones that it writes.
    """

    node: Node
    pages: tuple[int, ...] = ()
    shared: int = 0


class KVCache:
    """Accounts for `num_pages` pages of `page_size` tokens: each is free, idle in the tree, or in use."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size: Final = page_size
        self._num_pages = num_pages
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree()

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a request: free ones and idle ones."""
        return self._pool.free + self._tree.idle

    def stats(self) -> CacheStats:
        return CacheStats(
            pages_total=self._num_pages,
            pages_used=self._num_pages - self.available,
            pages_cached=self._tree.idle,
        )

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def new_table(self) -> BlockTable:
        return BlockTable(self._tree.root)

    def need(self, tokens: Sequence[int]) -> int:
        """By how many pages `available` falls when a new table comes to hold all of `tokens`; at least 1.

        Pages in the tree that somebody reads are shared for nothing; idle ones are taken out of `available`.
        """
        node = self._tree.root
        depth = 0
        while depth < self._reusable(tokens):
            child = node.children.get(self._block(tokens, depth))
            if child is None or not child.readers:
                break
            node = child
            depth += 1
        return self.pages_for(len(tokens)) - depth

    def reuse(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Continues `table` with the pages of the tree that hold what comes next in `tokens`.

        Returns how many positions the shared pages cover. That is less than `len(tokens)`: the last token
        is always computed, since its logits are wanted. A page of the table's own that was being filled
        with the same tokens is given up.
        """
        found: list[int] = []
        node = table.node
        for index in range(table.shared, self._reusable(tokens)):
            child = node.children.get(self._block(tokens, index))
            if child is None:
                break
            self._tree.acquire(child)
            found.append(child.page)
            node = child
        if found:
            for page in table.pages[table.shared :]:
                self._pool.give_back(page)
            table.pages = (*table.pages[: table.shared], *found)
            table.shared = len(table.pages)
            table.node = node
        return table.shared * self.page_size

    def room(self, table: BlockTable) -> int:
        """Up to how many positions `grow` can make `table` hold now."""
        return (len(table.pages) + self.available) * self.page_size

    def grow(self, table: BlockTable, positions: int) -> None:
        """Adds pages until `table` holds `positions` positions, at most `room(table)`. Evicts as needed."""
        missing = self.pages_for(positions) - len(table.pages)
        if missing > 0:
            table.pages += tuple(self._take() for _ in range(missing))

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Puts the pages that are full into the tree: all positions below `computed` have been written.

        When another request has put the same block there before, the table changes over to that page.
        """
        replaced: dict[int, int] = {}
        for index in range(table.shared, computed // self.page_size):
            page = table.pages[index]
            key = self._block(tokens, index)
            node = table.node.children.get(key)
            if node is None:
                node = self._tree.insert(table.node, key, page)
            else:
                self._tree.acquire(node)
                self._pool.give_back(page)
                replaced[index] = node.page
            table.node = node
            table.shared += 1
        if replaced:
            table.pages = tuple(replaced.get(index, page) for index, page in enumerate(table.pages))

    def release(self, table: BlockTable) -> None:
        """Empties `table`. Its pages in the tree stay there, idle when nobody else reads them."""
        self._tree.release_path(table.node)
        for page in table.pages[table.shared :]:
            self._pool.give_back(page)
        table.node, table.pages, table.shared = self._tree.root, (), 0

    def _reusable(self, tokens: Sequence[int]) -> int:
        return (len(tokens) - 1) // self.page_size

    def _block(self, tokens: Sequence[int], index: int) -> Block:
        begin = index * self.page_size
        return tuple(tokens[begin : begin + self.page_size])

    def _take(self) -> int:
        if not self._pool.free:
            self._pool.give_back(self._tree.evict())
        return self._pool.take()
