"""Which requests the next step computes, and how far: continuous batching over paged caches.

A step computes a slice of each of some requests. Every step has one budget of tokens: decodes come first,
prefills share the rest in chunks (`step_budget.py`), which end where snapshots are wanted (`cache/stops.py`).

Requests have an order: by priority, then by arrival. A step of priority is worth a queue full of arrivals,
so that in the end everybody has nobody before it (*aging*).

Pages are taken as a request grows, never for `max_tokens` ahead. When they run out, a request that cannot
compute even one token takes them from the last running request in the order, which is *preempted*: it goes
back to its place among the waiting ones with its outputs, and computes its keys and values again (its full
pages stay in the prefix tree as long as nobody else needs them). A request never takes pages from one that
is before it; it then pauses, with what it holds. So the first running request advances in every step of its
kind. Window pages and state slots never run out: no more requests run than there are some for.

Waiting requests are admitted in their order, as far as there are pages (`admission.py`). One whose deadline
passes before it was ever admitted ends as refused.

A quarantined request is computed in steps of its own. When both kinds have work, their steps alternate,
and several quarantined requests take turns.

While a step of decodes is under way, the next one can be planned `ahead` of its tokens, if it will be nothing
but one token more of the same requests. Those for which the first step's token turns out to be the last are
computed in vain in the second. Whoever ends while steps hold it leaves the caches at the end of the last one.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from moebius_worker.engine.admission import Admission
from moebius_worker.engine.cache.manager import KVCache
from moebius_worker.engine.cache.stops import stops_of
from moebius_worker.engine.limits import SchedulerConfig, check_request
from moebius_worker.engine.request_state import RequestState
from moebius_worker.engine.step_budget import share_budget
from moebius_worker.engine.types import Output, Rejected, Request, SchedulerStats, Slice, StepPlan
from moebius_worker.engine.waiting import WaitingRequests


class History(NamedTuple):
    """What the sampler must know. `output_ids` grows with the request; it is to be read only."""

    prompt_ids: Sequence[int]
    # Resumed ones included.
    output_ids: Sequence[int]
    request: Request


class Scheduler:
    """Takes requests, plans steps, turns sampled tokens into outputs. Not thread safe; one step at a time,
    and one that is planned ahead.

    The cycle is `plan = schedule()`, compute it, then `complete(plan, sampled)`, or `fail(plan.handles)` if
    computing it raised. `add` and `cancel` may be called at any moment.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._places = config.places
        self._step_tokens = config.step_tokens
        self._spare_stops = config.spare_stops
        self._page_size = config.layout.page_size
        self._has_states = config.layout.state_slots > 0
        self._cache = KVCache(config.layout)
        self._admission = Admission(config, self._cache)
        self._requests: dict[int, RequestState] = {}
        self._waiting = WaitingRequests()
        # In the order of their ranks.
        self._running: list[RequestState] = []
        self._arrivals = count()
        self._steps = 0
        self._plan = StepPlan(())
        # The requests of `_plan` whose slices have neither been completed nor failed.
        self._in_step: dict[int, RequestState] = {}
        # The step that was planned ahead of its completion, and the requests of that.
        self._next_plan = StepPlan(())
        self._in_next: dict[int, RequestState] = {}
        # Since the last look at the waiting requests something came or went.
        self._look = False
        self._quarantine_next = False
        self._preemptions = 0
        self._cached_tokens = 0

    # ---- requests come and go -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request, or raises `Rejected`. `max_tokens` beyond what fits is cut to that."""
        config = self._config
        check_request(request, config)
        if request.handle in self._requests:
            raise Rejected("BAD_REQUEST", f"handle {request.handle} is in use: choose another")
        free_places = max(0, self._places - len(self._running))
        if len(self._waiting) >= config.max_waiting + free_places:
            raise Rejected("OVERLOADED", f"{len(self._waiting)} requests are waiting: try again later")
        arrival = next(self._arrivals)
        state = RequestState(
            request=request,
            rank=(arrival + request.priority * (config.max_waiting + config.max_running), arrival),
            limit=min(request.prompt_len + request.max_tokens, config.max_length),
            table=self._cache.new_table(),
        )
        self._requests[request.handle] = state
        self._waiting.add(state)
        self._look = True

    def cancel(self, handle: int) -> bool:
        """Ends a request without another output; False when there is no such request (any more).

        Its pages are free at once, or, if steps with it are under way, at the end of the last; until then its
        handle stays taken.
        """
        state = self._requests.get(handle)
        if state is None or state.over:
            return False
        self._end(state)
        return True

    def fail(self, handles: Iterable[int]) -> list[int]:
        """Forgets requests after a step with them raised. Nothing that the step was writing is reused.

        If some of a step's requests failed alone (their sampling raised, say), the step is still to be
        completed for the others; if one was planned ahead of it, in any case. Returns those that were not
        over before.
        """
        failed: list[int] = []
        for handle in handles:
            state = self._requests.get(handle)
            if state is None:
                continue
            self._in_step.pop(handle, None)
            if not state.over:
                failed.append(handle)
            self._end(state, sound=False)
        return failed

    def history(self, handle: int) -> History:
        """KeyError when there is no such request. One that ends during a step is there until its end."""
        state = self._requests[handle]
        return History(state.prompt_ids, state.outputs, state.request)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            preemptions=self._preemptions,
            cached_tokens=self._cached_tokens,
            cache=self._cache.stats(),
        )

    # ---- the step -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plans a step; its plan has no slices only if there is no work. RuntimeError while one is under way.

        `now`: seconds, on the clock of the requests' deadlines.
        """
        if self._in_step:
            raise RuntimeError(f"the step before is not complete: requests {sorted(self._in_step)}")
        self._steps += 1
        refused = self._expire(now)
        self._admit()
        self._plan = StepPlan(self._compose(), refused)
        return self._plan

    def ahead(self, now: float) -> StepPlan | None:
        """Plans the step after the one under way. `complete` takes them in order, with one token a slice.

        None if it has to wait: one is planned already; the step under way is not of decodes alone; somebody
        may be admitted after it, or is quarantined; or there are no pages without taking them from others.
        """
        in_step, running, cache = self._in_step, self._running, self._cache
        if self._in_next or not all(
            len(piece.token_ids) == 1 and piece.sample for piece in self._plan.slices
        ):
            return None
        if any(state.quarantined or state.handle not in in_step for state in running):
            return None
        going_on = [state for state in running if len(state.tokens) + 1 < state.limit]
        if not going_on or (self._waiting and (self._look or len(going_on) < len(running))):
            return None
        missing = sum(cache.pages_for(len(state.tokens) + 1) - len(state.table.pages) for state in going_on)
        if missing > cache.available:
            return None
        self._steps += 1
        rows = {handle: row for row, handle in enumerate(self._plan.handles)}
        self._in_next = {state.handle: state for state in going_on}
        slices = tuple(self._slice_ahead(state, rows[state.handle]) for state in going_on)
        self._next_plan = StepPlan(slices, self._expire(now))
        return self._next_plan

    def complete(
        self, plan: StepPlan, sampled: Mapping[int, Sequence[int]], ended: Collection[int] = ()
    ) -> list[Output]:
        """Takes the tokens sampled for each slice of `plan` with `sample`: one, or several if speculated.

        Requests in `ended` end with them: their texts are whole. Those that are over or failed need none.
        RuntimeError when `plan` is not that of the step under way, ValueError (and nothing changed) when a
        request's tokens are missing.
        """
        if plan is not self._plan:
            raise RuntimeError("the plan is not that of the step under way")
        in_step = self._in_step
        for piece in plan.slices:
            if piece.sample and not sampled.get(piece.handle):
                state = in_step.get(piece.handle)
                if state and not state.over:
                    raise ValueError(f"no token was sampled for request {piece.handle}")
        outputs: list[Output] = []
        commit = self._cache.commit
        for handle, token_ids, start, _, sample, _, _ in plan.slices:
            state = in_step.pop(handle, None)
            if state is None:
                continue
            end = start + len(token_ids)
            # Unless it was over before its token, of which this step was planned ahead, was taken.
            known = end <= len(state.tokens)
            if known:
                state.advance_to(end)
                commit(state.table, state.tokens, end)
            if state.over:
                self._end(state, sound=known)
            elif sample:
                output = state.accept(sampled[handle], whole=handle in ended)
                outputs.append(output)
                if output.finish is not None:
                    self._end(state)
        if self._in_next:
            self._plan, self._in_step, self._in_next = self._next_plan, self._in_next, {}
        return outputs

    def _expire(self, now: float) -> tuple[tuple[int, Rejected], ...]:
        late = self._waiting.late(now)
        for state in late:
            self._withdraw(state)
            self._forget(state)
        message = "the deadline passed before the request could begin: try again later, or allow it more time"
        return tuple((state.handle, Rejected("DEADLINE", message)) for state in late)

    # ---- admission ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Moves waiting requests to the running ones."""
        self._look = False
        for state in self._admission.admitted(self._waiting, self._running, self._steps):
            self._waiting.remove(state)
            self._start(state)

    def _start(self, state: RequestState) -> None:
        state.running = state.begun = self._look = True
        # Among quarantined requests it joins the end of the round.
        state.last_step = self._steps
        insort(self._running, state, key=attrgetter("rank"))
        config, length = self._config, len(state.tokens)
        stops = stops_of(length, self._page_size, config.snapshot_interval, self._spare_stops)
        self._cache.start(state.table, stops)
        self._reuse(state)

    def _reuse(self, state: RequestState, patience: int | None = None) -> None:
        """Lets a prefill skip what is in the tree by now; another request may have just computed it."""
        covered = self._cache.reuse(state.table, state.tokens, patience)
        self._cached_tokens += state.skip_to(covered)

    # ---- composition --------------------------------------------------------------------------------

    def _compose(self) -> tuple[Slice, ...]:
        """The slices of a step of the kind whose turn it is, or of the other if that cannot advance."""
        alone = [[state] for state in self._running if state.quarantined]
        if not alone:
            self._quarantine_next = True
            return self._fill(list(self._running))
        alone.sort(key=lambda batch: batch[0].last_step)
        ordinary = [state for state in self._running if not state.quarantined]
        batches = [*alone, ordinary] if self._quarantine_next else [ordinary, *alone]
        for batch in batches:
            # A batch that could not advance may have preempted others, in vain: what they had was shared.
            slices = self._fill([state for state in batch if state.running])
            if slices:
                self._quarantine_next = batch is ordinary
                return slices
        return ()

    def _fill(self, batch: Sequence[RequestState]) -> tuple[Slice, ...]:
        """Slices for those of `batch`, in their order, that get tokens of the budget and pages for them."""
        slices: list[Slice] = []
        page_size = self._page_size
        for state, grant in zip(batch, self._grants(batch), strict=True):
            # One before it in this step may have preempted it.
            if grant and state.running:
                computed = state.computed
                end = computed + grant
                if end > len(state.table.pages) * page_size:
                    end = min(end, self._make_room(state))
                    self._cache.grow(state.table, end)
                if end > computed:
                    slices.append(self._slice(state, end))
        return tuple(slices)

    def _grants(self, batch: Sequence[RequestState]) -> list[int]:
        pending = [len(state.tokens) - state.computed for state in batch]
        if max(pending, default=1) == 1:
            return share_budget(self._step_tokens, pending)
        for index, state in enumerate(batch):
            if pending[index] > 1:
                stops = state.table.stops
                self._reuse(state, stops.interval // self._page_size + 1)
                stop = stops.next(state.computed) if self._has_states else None
                pending[index] = state.pending if stop is None else min(state.pending, stop - state.computed)
        if 1 not in pending:
            return share_budget(self._step_tokens, pending)
        starts = [state.computed for state in batch]
        return share_budget(self._step_tokens, pending, starts, self._config.keys_per_token)

    def _make_room(self, state: RequestState) -> int:
        """How many positions `state` can hold. Preempts the last ones until those are new ones.

        Those are after `state`, and hence have no slice in this step yet.
        """
        while True:
            room = self._cache.room(state.table)
            last = self._running[-1]
            if room > state.computed or last is state:
                return room
            self._preempt(last)

    def _slice(self, state: RequestState, end: int) -> Slice:
        start, table = state.computed, state.table
        state.last_step = self._steps
        handle = state.handle
        self._in_step[handle] = state
        return Slice(
            handle,
            tuple(state.tokens[start:end]),
            start,
            table.pages,
            end == len(state.tokens),
            table.window_pages,
            self._cache.state_step(table, end) if self._has_states else None,
        )

    def _slice_ahead(self, state: RequestState, row: int) -> Slice:
        """Of the token that is drawn from `row`. No snapshot is due: those are made of prompts."""
        position, table = len(state.tokens), state.table
        self._cache.grow(table, position + 1)
        state.last_step = self._steps
        return Slice(state.handle, (~row,), position, table.pages, True, table.window_pages, table.state_step)

    # ---- changes of state ---------------------------------------------------------------------------

    def _preempt(self, state: RequestState) -> None:
        self._withdraw(state)
        # Of what it leaves, its last page is the first to go: a snapshot there would go with it.
        self._cache.release(state.table)
        state.computed = 0
        state.overtaken = self._config.max_overtakes
        self._waiting.add(state)
        self._preemptions += 1

    def _withdraw(self, state: RequestState) -> None:
        (self._running if state.running else self._waiting).remove(state)
        state.running, self._look = False, True

    def _end(self, state: RequestState, *, sound: bool = True) -> None:
        """It is forgotten at the end of the last step that holds it."""
        if not state.over:
            self._withdraw(state)
            state.over = True
        if state.handle not in self._in_step and state.handle not in self._in_next:
            self._forget(state, sound=sound)

    def _forget(self, state: RequestState, *, sound: bool = True) -> None:
        """`sound`: what it has computed is right."""
        self._cache.release(state.table, state.computed if sound else 0)
        del self._requests[state.handle]
