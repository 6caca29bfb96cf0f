"""A world for a scheduler: a runner that remembers what is in each page, and a checker of every step.

The "keys and values" of a position are a digest of the whole text up to it. A slice may be computed only
if the positions before it hold the digests of its own request's text: that proves block tables, sharing
and the prefix cache. The next token is a function of the digest, so each request's output is known without
a scheduler (`expected_output`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

from moebius_worker.engine.cache.manager import KVCache
from moebius_worker.engine.cache.radix import Node, path
from moebius_worker.engine.scheduler import Scheduler, SchedulerConfig
from moebius_worker.engine.types import Finish, Output, Request, SamplingParams, Slice, StepPlan

VOCABULARY = 29
STOP = frozenset({0})


def config(**changes: int) -> SchedulerConfig:
    sizes = {
        "page_size": 4,
        "num_pages": 64,
        "max_running": 8,
        "max_step_tokens": 32,
        "max_model_len": 10_000,
        "max_waiting": 1000,
    }
    return SchedulerConfig(**(sizes | changes))


def request(
    handle: int,
    tokens: Sequence[int] | int = 10,
    max_tokens: int = 4,
    *,
    resumed: int = 0,
    min_tokens: int = 0,
    stop: frozenset[int] = frozenset(),
    quarantined: bool = False,
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
        self.scheduler = Scheduler(settings)
        self.limit = min(settings.max_model_len, settings.num_pages * settings.page_size)
        # Tokens that the runner returns for each sampled slice.
        self.speculated = speculated
        # (page, offset) -> digest of the text up to there.
        self.store: dict[tuple[int, int], object] = {}
        self.requests: dict[int, Request] = {}
        # Of live requests: all tokens, their digests, and the position after the last slice.
        self.tokens: dict[int, list[int]] = {}
        self.digests: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        # Of finished requests: how they ended, and all their tokens.
        self.finished: dict[int, Finish] = {}
        self._final: dict[int, list[int]] = {}
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
        plan = self.scheduler.schedule()
        self.steps += 1
        self._check_plan(plan)
        self.audit()
        self.audit_writers(plan)
        return plan

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
        for piece in plan.slices:
            for position in range(piece.start, piece.end):
                self.store[self._slot(piece, position)] = "nonsense"
        self.scheduler.fail(plan.handles)
        for handle in plan.handles:
            self._drop(handle)
        self.audit()

    def has_work(self) -> bool:
        stats = self.scheduler.stats()
        return stats.running + stats.waiting > 0

    def drain(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        while self.has_work():
            assert max_steps > 0, f"not finished: {sorted(self.tokens)}"
            max_steps -= 1
            assert self.step().slices
        assert self.scheduler.stats().cache.pages_used == 0
        assert not self.tokens

    def check_outputs(self) -> None:
        """Every finished request has what an undisturbed run gives."""
        for handle, finish in self.finished.items():
            asked = self.requests[handle]
            assert (self.outputs(handle), finish) == expected_output(asked, self.limit)

    def outputs(self, handle: int) -> list[int]:
        return self._final[handle][self.requests[handle].prompt_len :]

    # ---- the runner ---------------------------------------------------------------------------------

    def compute(self, plan: StepPlan) -> dict[int, list[int]]:
        for piece in plan.slices:
            text = self._digests(piece.handle)
            for position in range(piece.start):
                assert self.store[self._slot(piece, position)] == text[position]
        for piece in plan.slices:
            for position in range(piece.start, piece.end):
                self.store[self._slot(piece, position)] = self._digests(piece.handle)[position]
        sampled = {}
        for piece in plan.slices:
            if piece.sample:
                digest = self.store[self._slot(piece, piece.end - 1)]
                sampled[piece.handle] = self._continue(digest)
        return sampled

    def _continue(self, digest: object) -> list[int]:
        tokens: list[int] = []
        for _ in range(self.speculated):
            assert isinstance(digest, int)
            tokens.append(next_token(digest))
            digest = hash((digest, tokens[-1]))
        return tokens

    def _slot(self, piece: Slice, position: int) -> tuple[int, int]:
        size = self.config.page_size
        return piece.pages[position // size], position % size

    # ---- the checker --------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        size = self.config.page_size
        assert len(set(plan.handles)) == len(plan.slices)
        assert sum(len(piece.token_ids) for piece in plan.slices) <= self.config.max_step_tokens
        quarantined = [handle for handle in plan.handles if self.requests[handle].quarantined]
        assert not quarantined or len(plan.slices) == 1
        for piece in plan.slices:
            tokens = self.tokens[piece.handle]
            assert piece.token_ids
            assert piece.token_ids == tuple(tokens[piece.start : piece.end])
            assert piece.sample == (piece.end == len(tokens))
            # Pages for what is computed, and none ahead of it.
            assert len(piece.pages) == -(-piece.end // size)
            if piece.start < self.computed[piece.handle]:
                self.restarts += 1
            if piece.start != self.computed[piece.handle]:
                assert piece.start % size == 0, "only whole pages are skipped or kept"
            self.computed[piece.handle] = piece.end
            self.work[piece.handle] += len(piece.token_ids)
        assert self.restarts <= self.scheduler.stats().preemptions
        running = self.scheduler._running
        assert len(running) <= self.config.max_running
        if running:
            self._check_oldest(running[0].request.handle, plan)

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
        running, waiting = scheduler._running, scheduler._waiting
        assert [state.arrival for state in running] == sorted({state.arrival for state in running})
        assert [state.arrival for state in waiting] == sorted({state.arrival for state in waiting})
        cancelled = {handle for handle, state in scheduler._requests.items() if state.cancelled}
        assert cancelled <= set(scheduler._in_step)
        assert {state.request.handle for state in running + waiting} | cancelled == set(scheduler._requests)
        assert len(running) + len(waiting) + len(cancelled) == len(states)
        assert all(not state.table.pages and not state.computed for state in waiting)
        audit_cache(cache, [state.table for state in states])
        size = self.config.page_size
        for state in states:
            shared = state.table.shared * size
            keys = [node.key for node in path(state.table.node)][::-1]
            assert sum(keys, ()) == tuple(state.tokens[:shared])
            assert state.computed >= shared
        stats = scheduler.stats()
        assert (stats.running, stats.waiting) == (len(running), len(waiting))

    def audit_writers(self, plan: StepPlan) -> None:
        """A page that the step writes is in no other block table and not in the tree."""
        size = self.config.page_size
        readers = Counter(page for state in self.scheduler._requests.values() for page in state.table.pages)
        in_tree = {node.page for node in nodes(self.scheduler._cache)}
        for piece in plan.slices:
            for page in piece.pages[piece.start // size :]:
                assert readers[page] == 1
                assert page not in in_tree

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
            self._final[output.handle] = self.tokens[output.handle]
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


def audit_cache(cache: KVCache, tables: Sequence) -> None:
    """Free + tree + own pages are all pages, each once; readers are those that are; idle order is right."""
    in_tree = nodes(cache)
    own = [page for table in tables for page in table.pages[table.shared :]]
    free = cache._pool._free
    pages = [*free, *own, *(node.page for node in in_tree)]
    assert sorted(pages) == list(range(cache._num_pages))
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
    assert stats.pages_total == cache._num_pages
    assert stats.pages_cached == len(order)
    assert stats.pages_used == cache._num_pages - len(free) - len(order)
    assert stats.pages_used == len({page for table in tables for page in table.pages})
