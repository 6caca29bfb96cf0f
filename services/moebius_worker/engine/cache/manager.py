"""Who reads and who writes which page: block tables over the pools and the prefix tree."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.cache.pages import PagePool
from moebius_worker.engine.cache.radix import Block, Node, PrefixTree
from moebius_worker.engine.cache.side_pool import SidePool
from moebius_worker.engine.cache.stops import Stops
from moebius_worker.engine.types import CacheStats, StateStep


@dataclass(eq=False, slots=True)
class BlockTable:
    """What one request has in the caches, in the order of its positions. Changed by `KVCache` alone.

    The first `shared` pages are the tree's, on the path that ends in `node`; they are full and read only.
    The pages after them are the request's own, the only ones that it writes.
    """

    node: Node
    pages: tuple[int, ...] = ()
    shared: int = 0
    # If there are window layers: their pages, parallel to `pages`; -1 for those that the window has left.
    window_pages: tuple[int, ...] = ()
    # The nodes of those among them that are the tree's: the last ones on the path.
    held: deque[Node] = field(default_factory=deque)
    # If there are linear-attention layers: the request's slot, from `start` to `release`.
    slot: int | None = None
    # The node, read until the next commit, whose snapshot the next slice begins with.
    restore: Node | None = None
    # A slot to which the slice under way leaves a snapshot.
    save: int | None = None
    # What a slice does with the state as a rule.
    state_step: StateStep | None = None
    # A commit of fewer positions has nothing to do.
    due: int = 0
    stops: Stops = field(default_factory=Stops)


class KVCache:
    """Accounts for all pools of `layout`: a page is free, idle in the tree, or in use.

    A request may go on from a node of the tree if all that its layers look back to is there: the pages on
    the path, the window's pages of the last nodes, and a snapshot of the state at the node.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self.page_size: Final = layout.page_size
        self._pool = PagePool(layout.num_pages)
        self._tree = PrefixTree()
        self._windows = None if layout.window is None else SidePool(layout.num_window_pages)
        self._states = SidePool(layout.state_slots) if layout.state_slots else None

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a request: free ones and idle ones."""
        return self._pool.free + self._tree.idle

    @property
    def startable(self) -> bool:
        """Whether a slot is left for another request, if requests need slots."""
        return self._states is None or self._states.available > 0

    def stats(self) -> CacheStats:
        stats = CacheStats(
            pages_total=self._layout.num_pages,
            pages_used=self._layout.num_pages - self.available,
            pages_cached=self._tree.idle,
        )
        if self._windows is not None:
            stats = stats._replace(window_pages=self._windows.stats())
        if self._states is not None:
            stats = stats._replace(state_slots=self._states.stats())
        return stats

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def new_table(self) -> BlockTable:
        return BlockTable(self._tree.root)

    def need(self, tokens: Sequence[int]) -> int:
        """By how many pages `available` falls when a new table comes to hold all of `tokens`; at least 1.

        Pages in the tree that somebody reads are shared for nothing; idle ones are taken out of `available`.
        """
        _, resumable = self._walk(self.new_table(), tokens, read_by_others=True)
        return self.pages_for(len(tokens)) - resumable

    def start(self, table: BlockTable, stops: Stops) -> None:
        """Gives `table` a slot, if requests need any; only when `startable`."""
        table.stops = stops
        if self._states is not None:
            table.slot = self._states.take()
            table.state_step = StateStep(table.slot)

    def reuse(self, table: BlockTable, tokens: Sequence[int], patience: int | None = None) -> int:
        """Continues `table` with the pages of the tree that hold what comes next in `tokens`.

        Returns how many positions the shared pages cover. That is less than `len(tokens)`: the last token
        is always computed, since its logits are wanted. A page of the table's own that was being filled
        with the same tokens is given up. `patience`: after so many pages from which the request could not go
        on the search ends; None: it does not.
        """
        found, resumable = self._walk(table, tokens, patience)
        if len(found) > resumable and found[-1].children:
            # Other texts go on from there, so more may come.
            table.stops.branch = (table.shared + len(found)) * self.page_size
        if resumable:
            self._continue(table, found[:resumable])
        return table.shared * self.page_size

    def room(self, table: BlockTable) -> int:
        """Up to how many positions `grow` can make `table` hold now."""
        return (len(table.pages) + self.available) * self.page_size

    def grow(self, table: BlockTable, positions: int) -> None:
        """Adds pages until `table` holds `positions` positions, at most `room(table)`. Evicts as needed."""
        missing = self.pages_for(positions) - len(table.pages)
        if missing > 0:
            table.pages += tuple(self._take() for _ in range(missing))
            if self._windows is not None:
                table.window_pages += tuple(self._windows.take() for _ in range(missing))

    def state_step(self, table: BlockTable, end: int) -> StateStep | None:
        """What a slice that ends at `end` does with the state; None if there are no linear-attention layers.

        At a stop it leaves a snapshot, if a slot can be had.
        """
        if self._states is None:
            return None
        if end in table.stops and self._states.available:
            table.save = self._states.take()
        if table.restore is None and table.save is None:
            return table.state_step
        table.due = 0
        assert table.slot is not None
        restore = None if table.restore is None else self._states.number(table.restore)
        return StateStep(table.slot, restore, table.save)

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """All positions below `computed` have been written: puts the pages that are full into the tree.

        When another request has put the same block there before, the table changes over to that page. Window
        pages that no later position looks back to are let go. The snapshot, if one was made, is the tree's.
        """
        if computed < table.due:
            return
        full = computed // self.page_size
        if full > table.shared:
            self._share(table, tokens, full)
        table.due = (full + 1) * self.page_size
        if self._windows is not None:
            self._slide(table, self._windows, computed)
            # When the first page held is left, if any is.
            left = (table.shared - len(table.held) + 1) * self.page_size
            table.due = min(table.due, left + (self._layout.window or 0) - 1)
        if self._states is not None:
            self._settle(table, self._states)

    def release(self, table: BlockTable, computed: int = 0) -> None:
        """Empties `table`. What it has in the tree stays there, idle when nobody else reads it.

        `computed`: the position that its state stands at. If that is a page's end, the state becomes a
        snapshot. 0 if the state is not sound, since a step raised.
        """
        if self._states is not None and table.slot is not None:
            self._leave_state(table, self._states, computed)
        if self._windows is not None:
            for node in table.held:
                self._windows.let_go(node)
            table.held.clear()
            for page in table.window_pages[table.shared :]:
                self._windows.give_back(page)
        self._tree.release_path(table.node)
        for page in table.pages[table.shared :]:
            self._pool.give_back(page)
        table.node, table.pages, table.window_pages = self._tree.root, (), ()
        table.shared = table.due = 0

    # ---- finding ------------------------------------------------------------------------------------

    def _walk(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        patience: int | None = None,
        *,
        read_by_others: bool = False,
    ) -> tuple[list[Node], int]:
        """The nodes that hold what comes next in `tokens`, and after how many of them it can be gone on.

        `read_by_others`: only nodes that somebody reads are looked at.
        """
        found: list[Node] = []
        resumable = 0
        node = table.node
        # Since which page there is a window page on each node of the path.
        window_since = table.shared - len(table.held)
        windows, states = self._windows, self._states
        for index in range(table.shared, (len(tokens) - 1) // self.page_size):
            child = node.children.get(self._block(tokens, index))
            if child is None or (read_by_others and not child.readers):
                break
            found.append(child)
            node = child
            if windows is not None and node not in windows:
                window_since = index + 1
            looks_back_to = self._layout.window_start((index + 1) * self.page_size)
            whole = windows is None or window_since <= looks_back_to
            if whole and (states is None or node in states):
                resumable = len(found)
            elif patience is not None and len(found) - resumable >= patience:
                break
        return found, resumable

    def _continue(self, table: BlockTable, found: Sequence[Node]) -> None:
        """Makes `found` the next nodes of the table's path, instead of pages of its own."""
        for node in found:
            self._tree.acquire(node)
        for page in table.pages[table.shared :]:
            self._pool.give_back(page)
        table.pages = (*table.pages[: table.shared], *(node.page for node in found))
        table.node = found[-1]
        if self._windows is not None:
            self._move_window(table, self._windows, found)
        table.shared = len(table.pages)
        table.due = 0
        if self._states is not None:
            if table.restore is not None:
                self._states.let_go(table.restore)
            self._states.hold(table.node)
            table.restore = table.node

    def _move_window(self, table: BlockTable, windows: SidePool, found: Sequence[Node]) -> None:
        for page in table.window_pages[table.shared :]:
            windows.give_back(page)
        end = table.shared + len(found)
        start = self._layout.window_start(end * self.page_size)
        window_pages = [*table.window_pages[: table.shared], *[-1] * len(found)]
        for index in range(max(start, table.shared), end):
            node = found[index - table.shared]
            window_pages[index] = windows.hold(node, keep=True)
            table.held.append(node)
        table.window_pages = tuple(window_pages)
        self._let_go(table, windows, start, end)

    # ---- committing ---------------------------------------------------------------------------------

    def _share(self, table: BlockTable, tokens: Sequence[int], full: int) -> None:
        replaced: dict[int, int] = {}
        replaced_window: dict[int, int] = {}
        for index in range(table.shared, full):
            page = table.pages[index]
            key = self._block(tokens, index)
            node = table.node.children.get(key)
            if node is None:
                node = self._tree.insert(table.node, key, page)
            else:
                self._tree.acquire(node)
                self._pool.give_back(page)
                replaced[index] = node.page
            if self._windows is not None:
                window_page = table.window_pages[index]
                if node in self._windows:
                    replaced_window[index] = self._windows.hold(node)
                    self._windows.give_back(window_page)
                else:
                    self._windows.leave(node, window_page)
                table.held.append(node)
            table.node = node
        table.shared = full
        table.pages = _replace(table.pages, replaced)
        table.window_pages = _replace(table.window_pages, replaced_window)

    def _slide(self, table: BlockTable, windows: SidePool, computed: int) -> None:
        start = self._layout.window_start(computed)
        if start > table.shared - len(table.held):
            self._let_go(table, windows, start, table.shared)

    def _let_go(self, table: BlockTable, windows: SidePool, start: int, shared: int) -> None:
        """Lets go the window pages before page `start`; first to be had are those that serve no stop."""
        stop: int | None = 0
        for index in range(shared - len(table.held), min(start, shared)):
            end = (index + 1) * self.page_size
            if stop is not None and stop < end:
                stop = table.stops.next(end - 1)
            serves = stop is not None and self._layout.window_start(stop) <= index
            windows.let_go(table.held.popleft(), keep=serves)
        table.window_pages = (*[-1] * start, *table.window_pages[start:])

    def _settle(self, table: BlockTable, states: SidePool) -> None:
        """A slice is computed: its state was restored before, and saved after it."""
        if table.restore is not None:
            states.let_go(table.restore)
            table.restore = None
        if table.save is not None:
            if table.node in states:
                states.give_back(table.save)
            else:
                states.leave(table.node, table.save)
                states.let_go(table.node)
            table.save = None

    def _leave_state(self, table: BlockTable, states: SidePool, computed: int) -> None:
        assert table.slot is not None
        if table.restore is not None:
            states.let_go(table.restore)
        if table.save is not None:
            states.give_back(table.save)
        if table.shared and table.shared * self.page_size == computed and table.node not in states:
            states.leave(table.node, table.slot)
            states.let_go(table.node)
        else:
            states.give_back(table.slot)
        table.slot = table.restore = table.save = table.state_step = None

    # ---- pages --------------------------------------------------------------------------------------

    def _block(self, tokens: Sequence[int], index: int) -> Block:
        begin = index * self.page_size
        return tuple(tokens[begin : begin + self.page_size])

    def _take(self) -> int:
        if not self._pool.free:
            node = self._tree.evict()
            for side in (self._windows, self._states):
                if side is not None:
                    side.drop(node)
            return node.page
        return self._pool.take()


def _replace(pages: tuple[int, ...], changes: dict[int, int]) -> tuple[int, ...]:
    if not changes:
        return pages
    return tuple(changes.get(index, page) for index, page in enumerate(pages))
