"""Which waiting requests may start with a step.

They are admitted in their order, when the pages for all their known tokens are there besides what the
running ones still need for theirs and for a little growth. One that does not fit is passed by, so that small
requests go on; but when `max_overtakes` later ones have been admitted before it, nobody passes it any more:
the running ones finish, and it is next. Nobody ever passes a preempted request: its client has been waiting
in the middle of a text.
"""

from collections.abc import Iterator, Sequence

from moebius_worker.engine.cache.manager import KVCache
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.request_state import RequestState
from moebius_worker.engine.waiting import WaitingRequests

# Waiting requests looked at in one step, and steps between two looks at one that did not fit: bounds on the
# cost of a step when the queue is long.
LOOKAHEAD = 64
LOOK_AGAIN_STEPS = 16


class Admission:
    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        self._config, self._cache, self._places = config, cache, config.places

    def admitted(
        self, waiting: WaitingRequests, running: Sequence[RequestState], step: int
    ) -> Iterator[RequestState]:
        """One after another: each is to be among the `running` ones before the next is asked for."""
        if not waiting or len(running) >= self._places:
            return
        cache = self._cache
        headroom = cache.available - sum(self._wanted(state) - len(state.table.pages) for state in running)
        passed_by: list[RequestState] = []
        # How many more may be admitted before those in `passed_by`.
        overtakes = LOOKAHEAD
        for state in waiting.first(LOOKAHEAD):
            if not cache.startable:
                return
            if self._fits(state, headroom, step):
                yield state
                headroom -= state.need + self._wanted(state) - cache.pages_for(len(state.tokens))
                overtakes -= 1
                for older in passed_by:
                    older.overtaken += 1
            else:
                passed_by.append(state)
                overtakes = min(overtakes, self._config.max_overtakes - state.overtaken)
            if overtakes <= 0 or len(running) >= self._places:
                return

    def _wanted(self, state: RequestState) -> int:
        """Pages that a running request has or should find free: for its tokens and the next few."""
        return self._cache.pages_for(min(len(state.tokens) + self._config.growth_tokens, state.limit))

    def _fits(self, state: RequestState, headroom: int, step: int) -> bool:
        # A look walks the tree, so one that found too little room is good for some steps.
        if state.need > headroom and step < state.look_again:
            return False
        state.need = self._cache.need(state.tokens)
        state.look_again = step + LOOK_AGAIN_STEPS
        return state.need <= headroom
