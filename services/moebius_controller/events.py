"""What people are told: the events of one look at the workers, each with its time and reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moebius_controller.decide import Action, GiveUp, History, Kill, Observation, Past, Start, State

# As many are kept as a person would read.
KEPT_EVENTS = 100


class What(StrEnum):
    STARTED = "started"
    READY = "ready"
    DIED = "died"
    KILLED = "killed"
    GAVE_UP = "gave up"


@dataclass(frozen=True, slots=True)
class Event:
    # Unix time.
    time: float
    worker: str
    run: int
    what: What
    reason: str


def events_of(
    history: History, observations: Sequence[Observation], actions: Sequence[Action], now: float
) -> list[Event]:
    """What is new in `observations`, held against the history before them, and what was done."""
    events = []
    for seen in observations:
        past = history.get(seen.worker, Past())
        if seen.health is not None and seen.health.state is State.READY and seen.run > past.ready:
            events.append(Event(now, seen.worker, seen.run, What.READY, "its engine serves"))
        if seen.death is not None and seen.run > past.dead:
            events.append(Event(now, seen.worker, seen.run, What.DIED, seen.death))
    events.extend(
        Event(now, action.worker, action.run, _WHAT[type(action)], action.reason) for action in actions
    )
    return events


_WHAT = {Start: What.STARTED, Kill: What.KILLED, GiveUp: What.GAVE_UP}
