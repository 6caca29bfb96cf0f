"""What the controller decides about: workers as they are seen, what is remembered of them, what can be done.

A worker's processes are numbered; these are its *runs*. A process of this machine is a *body* of its own; a
pod is a body that runs its container again and again, each time as another run.

Times are Unix times, durations are seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """`State` of worker.proto, without its prefix."""

    UNSPECIFIED = "UNSPECIFIED"
    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    RESTARTING = "RESTARTING"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Health:
    """A worker's last answer to GetStatus, as far as it matters here."""

    state: State
    # Requests that are computed or wait.
    requests: int = 0
    # Seconds since the engine's last sign of progress.
    last_progress: float = 0.0
    # What went wrong last, for people, its `Reason` of worker.proto without the prefix, and when; empty and
    # 0 if nothing did.
    last_fault: str = ""
    fault_reason: str = ""
    fault_at: float = 0.0
    # Engines that this process started after its first one.
    engine_restarts: int = 0
    # The fallback level that the engine runs on, and the last one that there is.
    level: int = 0
    levels: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """How a worker is. `run` is 0 before the first."""

    worker: str
    run: int = 0
    # Set when the process is gone: how it ended, for people. None while it runs, and before the first.
    death: str | None = None
    # None until this process has answered once.
    health: Health | None = None
    # Seconds since the last answer or, before the first, since the start.
    silence: float = 0.0
    # It ended because it was asked to, or with whoever had started it: that speaks against nobody.
    blameless: bool = False
    # Runs of this body before this one.
    restarts: int = 0
    # The fallback level that is written where the worker reads it.
    level: int = 0
    # What the worker was made from; with another one, nothing that was learnt holds.
    revision: str = ""
    # Workers that stand in for each other.
    group: str = ""

    # The rest is about workers that somebody else (kubelet, StatefulSet) starts when they are missing or
    # dead.
    kept: bool = False
    # Of a dead run: after how long the body starts the next one by itself. None: it never will.
    restart_in: float | None = None
    # Somebody else asked it as well, and finds that it is well.
    vouched: bool = False
    # Why it is left to Kubernetes: it is pending, its image is pulled, or its node is not heard.
    held: str = ""
    # Its deletion was asked for; and if whoever should end it is lost, for how long it should be gone by now.
    going: bool = False
    overdue: float | None = None
    # Its group is being replaced, one by one, by a later revision.
    rolling: bool = False
    node: str = ""
    # What the node itself says of its devices; empty if it finds them well.
    node_fault: str = ""

    @property
    def body(self) -> int:
        """The first run of this body."""
        return self.run - self.restarts

    @property
    def ready(self) -> bool:
        """It serves, as far as it said last."""
        if self.death is not None or self.going:
            return False
        return self.health is not None and self.health.state is State.READY


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """An error of the device under a worker."""

    node: str
    run: int
    time: float
    # The device is gone or says that it is broken: no kernel of ours can do that.
    lost: bool
    # For people.
    text: str


@dataclass(frozen=True, slots=True)
class Past:
    """What was seen of a worker, and done about it, so far."""

    # When the last run began (for us), and when the last dead one was seen dead or taken away.
    started_at: float = 0.0
    died_at: float = 0.0
    # Deaths in a row, up to that one.
    deaths: int = 0
    # The last runs that: were started by us, were seen, were seen ready, were seen dead, were taken away by
    # us.
    started: int = 0
    seen: int = 0
    ready: int = 0
    dead: int = 0
    replaced: int = 0
    # The last run that was taken away from a node that is lost.
    forced: int = 0
    # When it was given up; 0 if it is not.
    given_up_at: float = 0.0
    # When this run was first seen as FAILED; 0 if it is not.
    failed_at: float = 0.0
    # Of run `engine_run`: engine restarts when the row of engine deaths began, and at the last look, and
    # when the last of them was seen.
    engine_run: int = 0
    engine_base: int = 0
    engine_restarts: int = 0
    engine_at: float = 0.0
    # The level that it ran on then.
    engine_level: int = 0
    # The fallback level that it is to run on, since when and why, and the body to which that was written
    # last.
    level: int = 0
    level_at: float = 0.0
    level_reason: str = ""
    level_body: int = -1
    # The last level that there is, as far as the worker has said.
    levels: int = 0
    revision: str = ""
    # Since when its group is being replaced; 0 if it is not.
    rolling_at: float = 0.0
    # Errors of the device, the oldest first, and the time (of the worker) of the last one.
    faults: tuple[DeviceFault, ...] = ()
    fault_at: float = 0.0
    # The node that was marked because of it, and when.
    marked: str = ""
    marked_at: float = 0.0
    # Since when it is not there any more; 0 if it is.
    gone_at: float = 0.0

    @property
    def engine_deaths(self) -> int:
        """In a row, in this run."""
        return self.engine_restarts - self.engine_base


History = Mapping[str, Past]


class Trouble(StrEnum):
    """What can be wrong with a worker. `seconds` and `times` are those of the rung that names it."""

    # Its process is gone, and nobody else starts the next one.
    DEAD = "dead"
    # Its body ended and was not replaced by whoever keeps it for so many seconds.
    ENDED = "ended"
    # Its body starts the next run by itself, but only after more than so many seconds.
    BACK_OFF = "back-off"
    # So many deaths in a row.
    DEATHS = "deaths"
    # So many deaths of its engine in a row.
    ENGINE_DEATHS = "engine-deaths"
    # Its engine cannot be started, for so many seconds.
    FAILED = "failed"
    # It has answered (if it is kept: and served then), and has not for so many seconds.
    SILENT = "silent"
    # It never answered (if it is kept: or served) before so many seconds of silence, while others answer.
    MUTE = "mute"
    # It loads or has requests, and makes no progress for so many seconds.
    STUCK = "stuck"
    # It was to be gone so many seconds ago, on a node that is lost.
    LOST_NODE = "lost-node"
    # So many runs on its node lost their device: gone, or broken by its own word.
    DEVICE_LOST = "device-lost"
    # So many runs on its node had errors of the device, and none on any other node.
    DEVICE_FAULTS = "device-faults"


class Step(StrEnum):
    """What can be done about it."""

    # Another run in place of this one: start it, or take this one away so that whoever keeps it does.
    REPLACE = "replace"
    # Take it away without waiting for a node that is lost.
    FORCE = "force"
    NEXT_LEVEL = "next-level"
    # Mark the node, so that nothing of ours is placed there any more, and leave it.
    LEAVE_NODE = "leave-node"
    # Say why, leave it alone for a while.
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something is done: `reason` is for people."""

    trouble: Trouble | None
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start run number `run`."""

    worker: str
    run: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Replace:
    """Take run number `run` away, with its body. Whoever keeps it makes another; if nobody does, `Start`
    will.

    `drain`: it serves, and may finish what it has. `force`: nobody is there to end it.
    """

    worker: str
    run: int
    cause: Cause
    drain: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class SetLevel:
    """Write the fallback level to where the body of run number `run` reads it. Disturbs nothing by itself."""

    worker: str
    run: int
    cause: Cause
    level: int


@dataclass(frozen=True, slots=True)
class MarkNode:
    """Mark the node that run number `run` is on."""

    worker: str
    run: int
    cause: Cause
    node: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Say that run number `run` was the last for a while, and why: a person should look."""

    worker: str
    run: int
    cause: Cause


Action = Start | Replace | SetLevel | MarkNode | GiveUp
