"""A world for a scheduler: a runner that remembers what is in each page and slot, and a checker of each step.

The "keys and values" of a position, and the "state" after it, are a digest of the whole text up to it. A
slice may be computed only if the positions before it (of window layers: those that it looks back to) and its
slot hold the digests of its own request's text: that proves block tables, sharing, snapshots and the prefix
cache. The next token is a function of the digest, so each request's output is known without a scheduler
(`expected_output`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.cache.manager import BlockTable, KVCache
from moebius_worker.engine.cache.radix import Node, path
from moebius_worker.engine.cache.side_pool import SidePool
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Finish, Output, Request, SamplingParams, Slice, StepPlan

VOCABULARY = 29
STOP = frozenset({0})


def config(**changes: int) -> SchedulerConfig:
    """With `changes` to the sizes of the caches or to the scheduler's settings."""
    layout = {"page_size": 4, "num_pages": 64, "window": None, "num_window_pages": 0, "state_slots": 0}
    settings = {"max_running": 8, "max_step_tokens": 32, "max_model_len": 10_000, "max_waiting": 1000}
    layout |= {name: changes.pop(name) for name in layout if name in changes}
    return SchedulerConfig(layout=CacheLayout(**layout), **(settings | changes))


def request(
    handle: int,
    tokens: Sequence[int] | int = 10,
    max_tokens: int = 4,
    *,
    resumed: int = 0,
    min_tokens: int = 0,
    stop: frozenset[int] = frozenset(),
    quarantined: bool = False,
    priority: int = 0,
    deadline: float | None = None,
) -> Request:
    """`tokens` may be a length: then the text is one that no other handle has."""
    if isinstance(tokens, int):
        tokens = [1000 * (handle + 1) + i for i in range(tokens)]
    return Request(
        handle=handle,
        request_id=f"request-{handle}",
        token_ids=tuple(tokens),
        resumed=resumed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop,
        sampling=SamplingParams(),
        quarantined=quarantined,
        priority=priority,
        deadline=deadline,
    )


def digests(tokens: Sequence[int]) -> list[int]:
    result, digest = [], 0
    for token in tokens:
        digest = hash((digest, token))
        result.append(digest)
    return result


def next_token(digest: int) -> int:
    return digest % VOCABULARY


def expected_output(asked: Request, limit: int) -> tuple[list[int], Finish]:
    """What an undisturbed run generates, resumed tokens included, and how it ends."""
    tokens = list(asked.token_ids)
    digest = digests(tokens)[-1]
    while True:
        generated = len(tokens) - asked.prompt_len
        tokens.append(next_token(digest))
        digest = hash((digest, tokens[-1]))
        if tokens[-1] in asked.stop_token_ids and generated >= asked.min_tokens:
            return tokens[asked.prompt_len :], Finish.STOP
        if generated + 1 >= asked.max_tokens or len(tokens) >= limit:
            return tokens[asked.prompt_len :], Finish.LENGTH


class World:
    def __init__(self, settings: SchedulerConfig, speculated: int = 1) -> None:
        self.config = settings
        self.layout = settings.layout
        self.scheduler = Scheduler(settings)
        self.limit = min(settings.max_model_len, self.layout.num_pages * self.layout.page_size)
        # Seconds on the scheduler's clock; tests set it.
        self.now = 0.0
        # Tokens that the runner returns for each sampled slice.
        self.speculated = speculated
        # (page, offset) -> digest of the text up to there.
        self.store: dict[tuple[int, int], object] = {}
        # The same for window layers; and of each slot, the digest of the text that its state stands for.
        self.window_store: dict[tuple[int, int], object] = {}
        self.states: dict[int, object] = {}
        # Requests that ended because their deadline passed.
        self.expired: list[int] = []
        self.requests: dict[int, Request] = {}
        # Of live requests: all tokens, their digests, and the position after the last slice.
        self.tokens: dict[int, list[int]] = {}
        self.digests: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        # Of finished requests: how they ended, and all their tokens.
        self.finished: dict[int, Finish] = {}
        self.conversations: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        # Tokens computed for each request, over all steps.
        self.work: Counter[int] = Counter()
        self.restarts = 0
        self.steps = 0
        self._oldest = -1
        self._oldest_missed = 0

    # ---- what a caller does -------------------------------------------------------------------------

    def add(self, asked: Request) -> None:
        self.scheduler.add(asked)
        self.requests[asked.handle] = asked
        self.tokens[asked.handle] = list(asked.token_ids)
        self.digests[asked.handle] = digests(asked.token_ids)
        self.computed[asked.handle] = 0
        self.audit()

    def cancel(self, handle: int) -> bool:
        known = self.scheduler.cancel(handle)
        self._drop(handle)
        self.audit()
        return known

    def step(self, during: Callable[[StepPlan], object] | None = None) -> StepPlan:
        """One whole step; `during` is called while it is under way."""
        plan = self.begin()
        if during is not None:
            during(plan)
        self.end(plan)
        return plan

    def begin(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        self.steps += 1
        self._check_refused(plan)
        self._check_plan(plan)
        self.audit()
        self.audit_writers(plan)
        return plan

    def _check_refused(self, plan: StepPlan) -> None:
        for handle, refusal in plan.refused:
            assert refusal.reason == "DEADLINE"
            assert self.requests[handle].deadline <= self.now
            assert not self.work[handle], "it was computed"
            self.expired.append(handle)
            self._drop(handle)

    def end(self, plan: StepPlan, failed: Sequence[int] = ()) -> list[Output]:
        """The step is computed; the sampling of the requests in `failed` raises."""
        sampled = self.compute(plan)
        self.scheduler.fail(failed)
        for handle in failed:
            sampled.pop(handle, None)
        outputs = self.scheduler.complete(plan, sampled)
        for output in outputs:
            self._deliver(output)
        for handle in plan.handles:
            if handle not in self.scheduler._requests:
                self._drop(handle)
        self.audit()
        return outputs

    def fail(self, plan: StepPlan) -> None:
        """The step raises, after it has written nonsense to every page that it may write."""
        self._spoil(plan)
        self.scheduler.fail(plan.handles)
        for handle in plan.handles:
            self._drop(handle)
        self.audit()

    def _spoil(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            for position in range(piece.start, piece.end):
                self._write(piece, position, "nonsense")
            if piece.state is not None:
                self.states[piece.state.slot] = "nonsense"
                if piece.state.save is not None:
                    self.states[piece.state.save] = "nonsense"

    def has_work(self) -> bool:
        stats = self.scheduler.stats()
        return stats.running + stats.waiting > 0

    def drain(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        while self.has_work():
            assert max_steps > 0, f"not finished: {sorted(self.tokens)}"
            max_steps -= 1
            plan = self.step()
            assert plan.slices or plan.refused
        assert self.scheduler.stats().cache.pages_used == 0
        assert not self.tokens

    def check_outputs(self) -> None:
        """Every finished request has what an undisturbed run gives."""
        for handle, finish in self.finished.items():
            asked = self.requests[handle]
            assert (self.outputs(handle), finish) == expected_output(asked, self.limit)

    def outputs(self, handle: int) -> list[int]:
        return self.conversations[handle][self.requests[handle].prompt_len :]

    # ---- the runner ---------------------------------------------------------------------------------

    def compute(self, plan: StepPlan) -> dict[int, list[int]]:
        for piece in plan.slices:
            self._begin_state(piece)
        for piece in plan.slices:
            text = self._digests(piece.handle)
            for position in range(piece.start):
                assert self.store[self._slot(piece, position)] == text[position]
            if self.layout.window is not None:
                for position in range(max(0, piece.start - self.layout.window + 1), piece.start):
                    assert self.window_store[self._window_slot(piece, position)] == text[position]
            if piece.state is not None:
                assert self.states[piece.state.slot] == (text[piece.start - 1] if piece.start else 0)
        for piece in plan.slices:
            text = self._digests(piece.handle)
            for position in range(piece.start, piece.end):
                self._write(piece, position, text[position])
            if piece.state is not None:
                self.states[piece.state.slot] = text[piece.end - 1]
        for piece in plan.slices:
            if piece.state is not None and piece.state.save is not None:
                self.states[piece.state.save] = self.states[piece.state.slot]
        sampled = {}
        for piece in plan.slices:
            if piece.sample:
                digest = self.store[self._slot(piece, piece.end - 1)]
                sampled[piece.handle] = self._continue(digest)
        return sampled

    def _begin_state(self, piece: Slice) -> None:
        if piece.state is None:
            return
        if piece.state.restore is not None:
            assert piece.start > 0
            self.states[piece.state.slot] = self.states[piece.state.restore]
        elif piece.start == 0:
            self.states[piece.state.slot] = 0

    def _write(self, piece: Slice, position: int, content: object) -> None:
        self.store[self._slot(piece, position)] = content
        if self.layout.window is not None:
            self.window_store[self._window_slot(piece, position)] = content

    def _continue(self, digest: object) -> list[int]:
        tokens: list[int] = []
        for _ in range(self.speculated):
            assert isinstance(digest, int)
            tokens.append(next_token(digest))
            digest = hash((digest, tokens[-1]))
        return tokens

    def _slot(self, piece: Slice, position: int) -> tuple[int, int]:
        size = self.layout.page_size
        return piece.pages[position // size], position % size

    def _window_slot(self, piece: Slice, position: int) -> tuple[int, int]:
        size = self.layout.page_size
        page = piece.window_pages[position // size]
        assert page >= 0
        return page, position % size

    # ---- the checker --------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        size = self.layout.page_size
        assert len(set(plan.handles)) == len(plan.slices)
        assert sum(len(piece.token_ids) for piece in plan.slices) <= self.config.max_step_tokens
        quarantined = [handle for handle in plan.handles if self.requests[handle].quarantined]
        assert not quarantined or len(plan.slices) == 1
        for piece in plan.slices:
            self._check_slice(piece)
            self._check_side(piece)
            if piece.start < self.computed[piece.handle]:
                self.restarts += 1
            if piece.start != self.computed[piece.handle]:
                assert piece.start % size == 0, "only whole pages are skipped or kept"
            self.computed[piece.handle] = piece.end
        assert self.restarts <= self.scheduler.stats().preemptions
        running = self.scheduler._running
        assert len(running) <= self.config.max_running
        if running:
            self._check_oldest(running[0].request.handle, plan)

    def _check_slice(self, piece: Slice) -> None:
        tokens = self.tokens[piece.handle]
        assert piece.token_ids
        assert piece.token_ids == tuple(tokens[piece.start : piece.end])
        assert piece.sample == (piece.end == len(tokens))
        # Pages for what is computed, and none ahead of it.
        assert len(piece.pages) == -(-piece.end // self.layout.page_size)
        self.work[piece.handle] += len(piece.token_ids)

    def _check_side(self, piece: Slice) -> None:
        if self.layout.window is None:
            assert piece.window_pages == ()
        else:
            assert len(piece.window_pages) == len(piece.pages)
            left = max(0, piece.start - self.layout.window + 1) // self.layout.page_size
            # What lies before the window is released, and nothing else.
            assert [page < 0 for page in piece.window_pages] == [
                index < left for index in range(len(piece.pages))
            ]
        assert (piece.state is None) == (not self.layout.state_slots)
        if piece.state is not None and piece.state.save is not None:
            assert piece.end % self.layout.page_size == 0

    def _check_oldest(self, oldest: int, plan: StepPlan) -> None:
        """The oldest running request has its turn in the rounds of ordinary and quarantined steps."""
        if oldest != self._oldest or oldest in plan.handles:
            self._oldest, self._oldest_missed = oldest, 0
        if oldest not in plan.handles:
            self._oldest_missed += 1
        assert self._oldest_missed <= 2 * self.config.max_running, "the oldest request does not advance"
        if not any(asked.quarantined for asked in self.requests.values()):
            assert oldest in plan.handles

    def audit(self) -> None:
        scheduler = self.scheduler
        cache = scheduler._cache
        states = list(scheduler._requests.values())
        running, waiting = scheduler._running, list(scheduler._waiting)
        assert [state.rank for state in running] == sorted({state.rank for state in running})
        assert [state.rank for state in waiting] == sorted({state.rank for state in waiting})
        over = {handle for handle, state in scheduler._requests.items() if state.over}
        assert over <= {*scheduler._in_step, *scheduler._in_next}
        assert {state.request.handle for state in running + waiting} | over == set(scheduler._requests)
        assert len(running) + len(waiting) + len(over) == len(states)
        assert all(not state.table.pages and not state.computed for state in waiting)
        if self.layout.state_slots:
            assert all((state.table.slot is None) == (state in waiting) for state in states)
        audit_cache(cache, [state.table for state in states])
        size = self.layout.page_size
        for state in states:
            shared = state.table.shared * size
            keys = [node.key for node in path(state.table.node)][::-1]
            assert sum(keys, ()) == tuple(state.tokens[:shared])
            assert state.computed >= shared
        stats = scheduler.stats()
        assert (stats.running, stats.waiting) == (len(running), len(waiting))

    def audit_writers(self, plan: StepPlan) -> None:
        """A page or slot that the step writes is no other request's and not in the tree."""
        size = self.layout.page_size
        tables = [state.table for state in self.scheduler._requests.values()]
        cache = self.scheduler._cache
        readers = Counter(page for table in tables for page in table.pages)
        window_readers = Counter(page for table in tables for page in table.window_pages)
        in_tree = {node.page for node in nodes(cache)}
        windows_in_tree, snapshots = (
            {item.number for item in side._items.values()} if side else set()
            for side in (cache._windows, cache._states)
        )
        written: list[int] = []
        for piece in plan.slices:
            for page in piece.pages[piece.start // size :]:
                assert readers[page] == 1
                assert page not in in_tree
            for page in piece.window_pages[piece.start // size :]:
                assert window_readers[page] == 1
                assert page not in windows_in_tree
            if piece.state is not None:
                written += [slot for slot in (piece.state.slot, piece.state.save) if slot is not None]
                assert piece.state.restore is None or piece.state.restore in snapshots
        assert len(set(written)) == len(written)
        assert not snapshots & set(written)

    # ---- bookkeeping --------------------------------------------------------------------------------

    def _digests(self, handle: int) -> list[int]:
        known, tokens = self.digests[handle], self.tokens[handle]
        while len(known) < len(tokens):
            known.append(hash((known[-1], tokens[len(known)])))
        return known

    def _deliver(self, output: Output) -> None:
        assert output.token_ids
        if output.handle in self.cached:
            assert output.cached_tokens == 0
        else:
            self.cached[output.handle] = output.cached_tokens
        self.tokens[output.handle] += output.token_ids
        if output.finish is not None:
            self.finished[output.handle] = output.finish
            self.conversations[output.handle] = self.tokens[output.handle]
            self._drop(output.handle)

    def _drop(self, handle: int) -> None:
        # A cancelled request may still be in the step under way: its text is needed to its end.
        if handle not in self.scheduler._in_step:
            self.tokens.pop(handle, None)
            self.digests.pop(handle, None)
            self.computed.pop(handle, None)


def nodes(cache: KVCache) -> list[Node]:
    found: list[Node] = []
    stack = [cache._tree.root]
    while stack:
        node = stack.pop()
        found += node.children.values()
        stack += node.children.values()
    return found


def audit_cache(cache: KVCache, tables: Sequence[BlockTable]) -> None:
    """In every pool, free + tree + own are all, each once; readers and idle order are right."""
    in_tree = nodes(cache)
    own = [page for table in tables for page in table.pages[table.shared :]]
    free = cache._pool._free
    pages = [*free, *own, *(node.page for node in in_tree)]
    assert sorted(pages) == list(range(cache._layout.num_pages))
    assert [page for page, taken in enumerate(cache._pool._taken) if not taken] == sorted(free)

    readers: Counter[Node] = Counter()
    for table in tables:
        members = list(path(table.node))[::-1]
        readers.update(members)
        assert tuple(node.page for node in members) == table.pages[: table.shared]
    for node in in_tree:
        assert node.readers == readers[node]
        assert type(node.key) is tuple
        assert len(node.key) == cache.page_size
        assert node.parent is not None
        assert node.parent.children[node.key] is node

    order = {node: place for place, node in enumerate(cache._tree._idle)}
    assert set(order) == {node for node in in_tree if not node.readers}
    for node, place in order.items():
        assert all(order[child] < place for child in node.children.values())

    stats = cache.stats()
    assert stats.pages_total == cache._layout.num_pages
    assert stats.pages_cached == len(order)
    assert stats.pages_used == cache._layout.num_pages - len(free) - len(order)
    assert stats.pages_used == len({page for table in tables for page in table.pages})

    if cache._windows is not None:
        for table in tables:
            start = table.shared - len(table.held)
            held = tuple(cache._windows.number(node) for node in table.held)
            assert list(table.held) == list(path(table.node))[::-1][start:]
            assert table.window_pages[: table.shared] == (-1,) * start + held
        assert all(len(table.window_pages) == len(table.pages) for table in tables)
        own = [page for table in tables for page in table.window_pages[table.shared :]]
        used = {page for table in tables for page in table.window_pages if page >= 0}
        audit_side(cache._windows, in_tree, own, (node for table in tables for node in table.held))
        assert stats.window_pages.used == len(used)
    if cache._states is not None:
        own = [slot for table in tables for slot in (table.slot, table.save) if slot is not None]
        restored = [table.restore for table in tables if table.restore is not None]
        audit_side(cache._states, in_tree, own, restored)
        assert stats.state_slots.used == len(own) + len(set(restored))


def audit_side(side: SidePool, in_tree: Sequence[Node], own: Sequence[int], reading: Iterable[Node]) -> None:
    free = side._pool._free
    numbers = [*free, *own, *(item.number for item in side._items.values())]
    assert sorted(numbers) == list(range(side._size))
    assert [number for number, taken in enumerate(side._pool._taken) if not taken] == sorted(free)
    assert set(side._items) <= set(in_tree)
    readers = Counter(reading)
    assert all(item.readers == readers[node] for node, item in side._items.items())
    assert {*side._idle, *side._passed} == {node for node, item in side._items.items() if not item.readers}
