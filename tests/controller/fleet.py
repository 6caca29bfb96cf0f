"""Workers that suffer whatever a test thinks of, without processes; and what a controller makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, auto

from moebius_controller.decide import decide
from moebius_controller.history import remember
from moebius_controller.policy import Policy
from moebius_controller.types import (
    Action,
    GiveUp,
    Health,
    History,
    MarkNode,
    Observation,
    Replace,
    SetLevel,
    Start,
    State,
    Trouble,
)


class Condition(StrEnum):
    IDLE = auto()
    BUSY = auto()
    LOADING = auto()
    DRAINING = auto()
    RESTARTING = auto()
    FAILED = auto()
    # These are to be repaired, in time:
    STUCK_LOADING = auto()
    STUCK_BUSY = auto()
    SILENT = auto()
    DEAD = auto()


_STATES = {
    Condition.IDLE: State.READY,
    Condition.BUSY: State.READY,
    Condition.STUCK_BUSY: State.READY,
    Condition.STUCK_LOADING: State.LOADING,
    Condition.LOADING: State.LOADING,
    Condition.DRAINING: State.DRAINING,
    Condition.RESTARTING: State.RESTARTING,
    Condition.FAILED: State.FAILED,
}
_WITH_REQUESTS = {Condition.BUSY, Condition.STUCK_BUSY, Condition.DRAINING}
_WITHOUT_PROGRESS = {Condition.STUCK_BUSY, Condition.STUCK_LOADING, Condition.DRAINING, Condition.IDLE}


@dataclass
class FakeWorker:
    name: str
    run: int = 0
    condition: Condition = Condition.DEAD
    # When the condition began.
    since: float = 0.0
    health: Health | None = None

    def become(self, condition: Condition, now: float) -> None:
        """What is dead stays so until it is started."""
        if self.condition not in (Condition.DEAD, condition):
            self.condition, self.since = condition, now

    def start(self, run: int, now: float) -> None:
        assert self.condition is Condition.DEAD, f"{self.name} is started while it lives"
        assert run == self.run + 1
        self.run, self.condition, self.since, self.health = run, Condition.SILENT, now, None

    def observe(self, now: float) -> Observation:
        if self.run == 0:
            return Observation(self.name)
        if self.condition is Condition.DEAD:
            return Observation(self.name, self.run, "it was killed by SIGKILL")
        if self.condition is Condition.SILENT:
            return Observation(self.name, self.run, None, self.health, now - self.since)
        progress = now - self.since if self.condition in _WITHOUT_PROGRESS else 0.0
        requests = 3 if self.condition in _WITH_REQUESTS else 0
        self.health = Health(_STATES[self.condition], requests, progress)
        return Observation(self.name, self.run, None, self.health)

    def sick(self, policy: Policy, now: float) -> bool:
        """It lives, and is to be killed."""
        lasted = now - self.since
        match self.condition:
            case Condition.SILENT:
                return lasted > seconds_of(policy, Trouble.SILENT if self.health else Trouble.MUTE)
            case Condition.STUCK_BUSY | Condition.STUCK_LOADING:
                return lasted > seconds_of(policy, Trouble.STUCK)
            case _:
                return False


def seconds_of(policy: Policy, trouble: Trouble) -> float:
    """Of the first rung about it."""
    return next(rung.seconds for rung in policy.ladder if rung.when is trouble)


@dataclass
class Fleet:
    """Looks at its workers as `Controller` does; `reload` stands for a restart of the controller."""

    policy: Policy
    workers: list[FakeWorker]
    reload: Callable[[History], History] = lambda history: history
    now: float = 1_700_000_000.0
    history: History = field(default_factory=dict)
    actions: list[tuple[float, Action]] = field(default_factory=list)

    def look(self) -> list[Action]:
        """One round; kills and starts take effect at once."""
        seen = [worker.observe(self.now) for worker in self.workers]
        actions = decide(seen, self.history, self.policy, self.now)
        assert decide(seen, self.reload(self.history), self.policy, self.now) == actions
        self.history = self.reload(remember(self.history, seen, actions, self.policy, self.now))
        self.actions += [(self.now, action) for action in actions]
        by_name = {worker.name: worker for worker in self.workers}
        for action in actions:
            match action:
                case Start():
                    by_name[action.worker].start(action.run, self.now)
                case Replace():
                    assert action.run == by_name[action.worker].run
                    by_name[action.worker].become(Condition.DEAD, self.now)
                case GiveUp() | SetLevel() | MarkNode():
                    pass
        return actions

    def times(self, kind: type[Action]) -> list[float]:
        return [time for time, action in self.actions if isinstance(action, kind)]
