"""What is wrong with a worker: one function for each `Trouble`, from what is seen and remembered to a
reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moebius_controller.policy import Policy, Rung
from moebius_controller.types import DeviceFault, Health, History, Observation, Past, State, Trouble

# It does not serve, whatever it said last.
HANGS = frozenset({Trouble.SILENT, Trouble.MUTE, Trouble.STUCK})


@dataclass(frozen=True, slots=True)
class Case:
    """One worker at one look."""

    seen: Observation
    past: Past
    nodes: "Nodes"
    # Some worker answers us now: if another does not, it is not our own network's fault.
    heard_any: bool
    now: float


class Nodes:
    """What is remembered of nodes: it is spread over the pasts of the workers that were there."""

    def __init__(
        self, observations: Sequence[Observation], history: History, policy: Policy, now: float
    ) -> None:
        self._occupied = frozenset(seen.node for seen in observations if seen.node)
        self._marks: dict[str, float] = {}
        self._faults: dict[str, list[tuple[str, DeviceFault]]] = {}
        for worker, past in history.items():
            if past.marked:
                self._marks[past.marked] = max(past.marked_at, self._marks.get(past.marked, 0.0))
            for fault in past.faults:
                if fault.node and 0 <= now - fault.time < policy.fault_memory:
                    self._faults.setdefault(fault.node, []).append((worker, fault))

    def marked_after(self, node: str, fault: DeviceFault) -> bool:
        """The mark is about this fault too."""
        return self._marks.get(node, -1.0) >= fault.time

    def marked_since(self, time: float) -> set[str]:
        """By us."""
        return {node for node, marked_at in self._marks.items() if marked_at >= time}

    def faulty_runs(self, node: str, *, lost: bool) -> int:
        """Runs with errors of the device there since it was marked last; `lost`: only those that lost it."""
        since = self._marks.get(node, -1.0)
        return len(
            {
                (worker, fault.run)
                for worker, fault in self._faults.get(node, ())
                if fault.time > since and (fault.lost or not lost)
            }
        )

    def well_elsewhere(self, node: str) -> bool:
        """There are other nodes, and no run on any of them had errors of the device."""
        others = self._occupied - {node}
        return bool(others) and not others & self._faults.keys()


def trouble(rung: Rung, case: Case) -> str | None:
    """For people, if the worker has the rung's trouble."""
    return _TROUBLES[rung.when](rung, case)


def has_any(rungs: Sequence[Rung], case: Case) -> bool:
    return any(trouble(rung, case) is not None for rung in rungs)


def own_fault(seen: Observation, past: Past) -> DeviceFault | None:
    """The last error of the device under this very run."""
    for fault in reversed(past.faults):
        if fault.node == seen.node and fault.run == seen.run:
            return fault
    return None


def _dead(rung: Rung, case: Case) -> str | None:
    return None if case.seen.kept else case.seen.death


def _ended(rung: Rung, case: Case) -> str | None:
    seen = case.seen
    if not seen.kept or seen.death is None or seen.restart_in is not None:
        return None
    return seen.death if _lasted(case.past.died_at, case.now) >= rung.seconds else None


def _back_off(rung: Rung, case: Case) -> str | None:
    seen = case.seen
    if seen.death is None or seen.restart_in is None or seen.restart_in <= rung.seconds:
        return None
    return f"{seen.death}; the kubelet would wait {seen.restart_in:.0f} s"


def _deaths(rung: Rung, case: Case) -> str | None:
    deaths, death = case.past.deaths, case.seen.death
    if death is None or deaths < rung.times:
        return None
    return f"it died {deaths} times in a row, the last time so: {death}"


def _engine_deaths(rung: Rung, case: Case) -> str | None:
    health = _lives(case.seen)
    if health is None or case.past.engine_deaths < rung.times:
        return None
    return f"its engine died {case.past.engine_deaths} times in a row, the last time so: {health.last_fault}"


def _failed(rung: Rung, case: Case) -> str | None:
    health = _lives(case.seen)
    if health is None or health.state is not State.FAILED:
        return None
    if _lasted(max(case.past.failed_at, case.past.level_at), case.now) < rung.seconds:
        return None
    return f"its engine cannot be started: {health.last_fault}"


def _silent(rung: Rung, case: Case) -> str | None:
    seen = case.seen
    if seen.death is not None or not _was_heard(seen) or seen.vouched or seen.silence <= rung.seconds:
        return None
    return f"it has not answered for {seen.silence:.0f} s"


def _mute(rung: Rung, case: Case) -> str | None:
    seen = case.seen
    if seen.death is not None or _was_heard(seen) or seen.held or seen.silence <= rung.seconds:
        return None
    if seen.vouched or (seen.kept and not case.heard_any):
        return None
    if seen.health is None:
        return f"it did not answer within {seen.silence:.0f} s of its start"
    return f"it has not answered for {seen.silence:.0f} s, and did not serve before"


def _stuck(rung: Rung, case: Case) -> str | None:
    health = _lives(case.seen)
    if health is None or health.last_progress <= rung.seconds:
        return None
    if health.state is State.LOADING or (health.state is State.READY and health.requests):
        return f"it made no progress for {health.last_progress:.0f} s and does not repair itself"
    return None


def _lost_node(rung: Rung, case: Case) -> str | None:
    overdue = case.seen.overdue
    if overdue is None or overdue <= rung.seconds:
        return None
    return f"its node {case.seen.node} is lost, and it was to be gone {overdue:.0f} s ago"


def _device_lost(rung: Rung, case: Case) -> str | None:
    return _accused(rung, case, lost=True)


def _device_faults(rung: Rung, case: Case) -> str | None:
    accused = _accused(rung, case, lost=False)
    # With no other node to compare with, and none to go to, a kernel's error looks the same.
    return accused if accused is not None and case.nodes.well_elsewhere(case.seen.node) else None


def _accused(rung: Rung, case: Case, *, lost: bool) -> str | None:
    """This run had an error of the device, and it is one of several on its node, or the node is marked for
    it.
    """
    fault, node = own_fault(case.seen, case.past), case.seen.node
    if fault is None or (lost and not fault.lost):
        return None
    runs = case.nodes.faulty_runs(node, lost=lost)
    if not case.nodes.marked_after(node, fault) and runs < rung.times:
        return None
    what = "lost their device" if lost else "had errors of the device"
    return f"{max(runs, 1)} runs on node {node} {what}, this one so: {fault.text}"


def _was_heard(seen: Observation) -> bool:
    """It has answered, so that its silence means something. That of one which somebody else asks as well does
    only if it served: of others, who load or drain, that one's word is the same whether they hang or not.
    """
    return seen.health is not None and (not seen.kept or seen.health.state is State.READY)


def _lives(seen: Observation) -> Health | None:
    """What a worker that lives said last."""
    return seen.health if seen.death is None else None


def _lasted(since: float, now: float) -> float:
    """Seconds; a time in the future is a clock that was set back: no reason to wait for it to catch up."""
    return now - since if now >= since else float("inf")


_TROUBLES: Mapping[Trouble, Callable[[Rung, Case], str | None]] = {
    Trouble.DEAD: _dead,
    Trouble.ENDED: _ended,
    Trouble.BACK_OFF: _back_off,
    Trouble.DEATHS: _deaths,
    Trouble.ENGINE_DEATHS: _engine_deaths,
    Trouble.FAILED: _failed,
    Trouble.SILENT: _silent,
    Trouble.MUTE: _mute,
    Trouble.STUCK: _stuck,
    Trouble.LOST_NODE: _lost_node,
    Trouble.DEVICE_LOST: _device_lost,
    Trouble.DEVICE_FAULTS: _device_faults,
}
