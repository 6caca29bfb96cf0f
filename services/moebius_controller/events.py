"""What people are told: the events of one look at the workers, each with its time and reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moebius_controller.types import (
    Action,
    GiveUp,
    History,
    MarkNode,
    Observation,
    Past,
    Replace,
    SetLevel,
    Start,
)

# As many are kept as a person would read.
KEPT_EVENTS = 100
# Of one reason; pods and engines may say more, people do not read it.
LONGEST_TEXT = 900


class What(StrEnum):
    STARTED = "started"
    READY = "ready"
    DIED = "died"
    KILLED = "killed"
    LEVEL_SET = "level set"
    NODE_MARKED = "node marked"
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
        if seen.ready and seen.run > past.ready:
            events.append(Event(now, seen.worker, seen.run, What.READY, "its engine serves"))
        if seen.death is not None and seen.run > past.dead:
            events.append(Event(now, seen.worker, seen.run, What.DIED, shortened(seen.death)))
    events.extend(
        Event(now, action.worker, action.run, WHAT[type(action)], shortened(tell(action)))
        for action in actions
    )
    return events


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 4] + " ..."


def tell(action: Action) -> str:
    """What is done and why, for people who know which kind of action it is."""
    match action:
        case SetLevel():
            return f"fallback level {action.level}: {action.cause.reason}"
        case MarkNode():
            return f"{action.node}: {action.cause.reason}"
        case _:
            return action.cause.reason


WHAT = {
    Start: What.STARTED,
    Replace: What.KILLED,
    SetLevel: What.LEVEL_SET,
    MarkNode: What.NODE_MARKED,
    GiveUp: What.GAVE_UP,
}
