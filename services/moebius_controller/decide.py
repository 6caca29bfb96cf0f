"""What to do about each worker: a pure function of what is seen, what was done before, and the time.

It is level-triggered: it looks at how things are, never at how they became so, and a controller that was
restarted decides as the one before it would have. An action is for one run, and the history names the runs
that were dealt with, so that one cause has one action. It is the same for processes of this machine and for
pods; an observation says what happens to a worker without us.

Nothing here reads a clock or draws a random number.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from moebius_controller.history import see
from moebius_controller.policy import Policy, Rung, restart_delay
from moebius_controller.troubles import HANGS, Case, Nodes, has_any, own_fault, trouble
from moebius_controller.types import (
    Action,
    Cause,
    GiveUp,
    History,
    MarkNode,
    Observation,
    Replace,
    SetLevel,
    Start,
    State,
    Step,
)

# Seconds for which a worker's engine cannot be started until it is clear that the worker does not take up the
# level that was set. Less than those of the rung that replaces it.
LEVEL_PATIENCE = 15.0
# Seconds since its last answer for which a worker counts as one that answers: more than a late one takes.
HEARD = 5.0
# Seconds until a mark of ours is seen, at the latest.
MARK_SHOWS = 10.0


def decide(
    observations: Sequence[Observation],
    history: History,
    policy: Policy,
    now: float,
    marked_nodes: Collection[str] | None = (),
) -> list[Action]:
    """At most one action for each worker, none for most. `marked_nodes`: all that are marked, as far as
    seen; None: none can be marked.
    """
    pasts = {seen.worker: see(history.get(seen.worker), seen, policy, now) for seen in observations}
    nodes = Nodes(observations, {**history, **pasts}, policy, now)
    heard_any = any(seen.health is not None and seen.silence < HEARD for seen in observations)
    cases = [Case(seen, pasts[seen.worker], nodes, heard_any, now) for seen in observations]
    look = _Look(cases, policy, marked_nodes, nodes.marked_since(now - MARK_SHOWS))
    return [action for case in cases if (action := look.decide(case)) is not None]


class _Look:
    """What is decided in one look, and so limits what else is."""

    def __init__(
        self,
        cases: Sequence[Case],
        policy: Policy,
        marked_nodes: Collection[str] | None,
        marked_by_us: Collection[str],
    ) -> None:
        self._policy = policy
        self._hangs = [rung for rung in policy.ladder if rung.when in HANGS]
        self._ready = Counter(case.seen.group for case in cases if self._serves(case))
        self._marked = {*(marked_nodes or ()), *marked_by_us}
        self._max_marked = policy.max_marked_nodes if marked_nodes is not None else 0
        self._just_marked: set[str] = set()

    def decide(self, case: Case) -> Action | None:
        seen, past = case.seen, case.past
        if seen.run < past.started:
            return None  # Seen before the last start was carried out.
        if not seen.going and seen.level != past.level and seen.body != past.level_body:
            why = past.level_reason or "the worker's template changed"
            return SetLevel(seen.worker, seen.run, Cause(None, why), past.level)
        if seen.run == 0:
            return Start(seen.worker, 1, Cause(None, "it is to run"))
        if seen.run <= past.replaced and seen.death is None and not seen.going:
            return None  # Taken away, and not gone yet.
        for rung in self._policy.ladder:
            if seen.going and rung.step is not Step.FORCE:
                continue
            reason = trouble(rung, case)
            if reason is not None:
                action = self._take(rung, case, Cause(rung.when, reason))
                if action is not None:
                    return action
        return None

    def _take(self, rung: Rung, case: Case, cause: Cause) -> Action | None:
        """None if the rung's step cannot be taken, or not yet."""
        match rung.step:
            case Step.REPLACE:
                return self._replace(rung, case, cause)
            case Step.FORCE:
                return self._force(case, cause)
            case Step.NEXT_LEVEL:
                return _next_level(case, cause)
            case Step.LEAVE_NODE:
                return self._leave_node(case, cause)
            case Step.GIVE_UP:
                return self._give_up(case, cause)

    def _replace(self, rung: Rung, case: Case, cause: Cause) -> Action | None:
        seen, past = case.seen, case.past
        if seen.held or self._rolling(case) or (seen.ready and rung.when not in HANGS):
            return None
        if rung.when in HANGS:
            if not seen.kept:
                return Replace(seen.worker, seen.run, cause)  # The pause is before the next start.
            # Whatever it was given up for, it has got further than that.
            past = replace(past, given_up_at=0.0)
        since = past.given_up_at or past.died_at
        # A negative time is a clock that was set back: no reason to wait for it to catch up.
        if 0 <= case.now - since < restart_delay(seen.worker, past, self._policy):
            return None
        if seen.death is not None and not seen.kept:
            return Start(seen.worker, seen.run + 1, cause)
        return None if seen.run <= past.replaced else Replace(seen.worker, seen.run, cause)

    def _rolling(self, case: Case) -> bool:
        return case.seen.rolling and case.now - case.past.rolling_at < self._policy.rollout_patience

    def _force(self, case: Case, cause: Cause) -> Action | None:
        seen = case.seen
        return None if seen.run <= case.past.forced else Replace(seen.worker, seen.run, cause, force=True)

    def _leave_node(self, case: Case, cause: Cause) -> Action | None:
        seen, past = case.seen, case.past
        fault = own_fault(seen, past)
        known = fault is not None and case.nodes.marked_after(seen.node, fault)
        if seen.node not in self._marked and not known:
            if len(self._marked) >= self._max_marked:
                return None
            self._marked.add(seen.node)
            self._just_marked.add(seen.node)
            return MarkNode(seen.worker, seen.run, cause, seen.node)
        if seen.node in self._just_marked:
            return None  # Its successor could come back before the mark is there.
        if self._rolling(case) or seen.held or seen.run <= past.replaced or _loads(seen):
            return None
        if not self._serves(case):
            return Replace(seen.worker, seen.run, cause)
        if (seen.health and seen.health.requests) or self._ready[seen.group] <= self._policy.min_ready:
            return None
        self._ready[seen.group] -= 1
        return Replace(seen.worker, seen.run, cause, drain=True)

    def _serves(self, case: Case) -> bool:
        return case.seen.ready and not has_any(self._hangs, case)

    def _give_up(self, case: Case, cause: Cause) -> Action | None:
        seen, past = case.seen, case.past
        if seen.ready or past.given_up_at or not _level_in_effect(case):
            return None
        delay = restart_delay(seen.worker, replace(past, given_up_at=case.now), self._policy)
        reason = f"{cause.reason}; the next try is in {delay:.0f} s"
        return GiveUp(seen.worker, seen.run, Cause(cause.trouble, reason))


def _next_level(case: Case, cause: Cause) -> Action | None:
    seen, past = case.seen, case.past
    if past.level >= past.levels or not _level_in_effect(case):
        return None
    return SetLevel(seen.worker, seen.run, cause, past.level + 1)


def _level_in_effect(case: Case) -> bool:
    """What went wrong went wrong on the level that was set last, or the worker takes up no level."""
    health, past = case.seen.health, case.past
    if case.seen.death is not None or health is None or health.level >= past.level:
        return True
    had_it_from_the_start = past.started_at > past.level_at
    return had_it_from_the_start and past.failed_at > 0 and case.now - past.failed_at >= LEVEL_PATIENCE


def _loads(seen: Observation) -> bool:
    """It lives, and may yet come to serve."""
    return seen.death is None and (
        seen.health is None or seen.health.state in (State.LOADING, State.DRAINING)
    )
