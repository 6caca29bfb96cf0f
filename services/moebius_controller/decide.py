"""What to do about each worker: a pure function of what is seen, what was done before, and the time.

It is level-triggered: it looks at how things are, never at how they became so, and a controller that was
restarted decides as the one before it would have. A worker's processes are numbered; an action is for one of
these *runs*, and the history names the runs that were dealt with, so that one cause has one action.

Times are Unix times, durations are seconds. Nothing here reads a clock or draws a random number.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from moebius_common.backoff import backoff


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
    # What went wrong last, for people; empty if nothing did.
    last_fault: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """How a worker is. `run` counts its processes: 0 before the first."""

    worker: str
    run: int = 0
    # Set when the process is gone: how it ended, for people. None while it runs, and before the first.
    death: str | None = None
    # None until this process has answered once.
    health: Health | None = None
    # Seconds since the last answer or, before the first, since the start.
    silence: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """When to act."""

    # Silence after which a process that once answered is killed.
    unresponsive_timeout: float = 10.0
    # Silence after which one that never answered is killed.
    start_timeout: float = 60.0
    # Time without progress after which a worker that loads or has requests is killed. A worker repairs a
    # stalled engine itself, and much earlier; this is for one that fails to.
    progress_timeout: float = 900.0
    # From a death to the next start; doubles with each further death in a row.
    restart_delay: float = 0.25
    max_restart_delay: float = 30.0
    # A process that lived so long ends the row.
    healthy_after: float = 300.0
    # So many deaths in a row are a crash loop: from then on, `retry_delay` lies between death and start. It
    # is also how long a worker that cannot start its engine is left alone: a checkpoint may come back.
    max_deaths: int = 6
    retry_delay: float = 60.0


@dataclass(frozen=True, slots=True)
class Past:
    """What was seen of a worker, and done about it, so far."""

    # When the last process was started, and when the last dead one was seen dead.
    started_at: float = 0.0
    died_at: float = 0.0
    # Deaths in a row, up to that one.
    deaths: int = 0
    # The last runs that: were started, were seen ready, were seen dead, were killed by us, were given up.
    started: int = 0
    ready: int = 0
    dead: int = 0
    killed: int = 0
    given_up: int = 0
    given_up_at: float = 0.0


History = Mapping[str, Past]


@dataclass(frozen=True, slots=True)
class Start:
    """Start process number `run`."""

    worker: str
    run: int
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill process number `run`, which lives. Its death will be seen, and be a reason to start the next."""

    worker: str
    run: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Say that process number `run` was the last for a while, and why: a person should look."""

    worker: str
    run: int
    reason: str


Action = Start | Kill | GiveUp


def decide(observations: Sequence[Observation], history: History, policy: Policy, now: float) -> list[Action]:
    """At most one action for each worker, none for most."""
    actions = (_decide(seen, history.get(seen.worker, Past()), policy, now) for seen in observations)
    return [action for action in actions if action is not None]


def remember(
    history: History,
    observations: Sequence[Observation],
    actions: Sequence[Action],
    policy: Policy,
    now: float,
) -> dict[str, Past]:
    """The history after `actions`, which were decided on `observations`, were carried out."""
    after = {seen.worker: _see(history.get(seen.worker, Past()), seen, policy, now) for seen in observations}
    for action in actions:
        past = after[action.worker]
        match action:
            case Start():
                after[action.worker] = replace(past, started=action.run, started_at=now)
            case Kill():
                after[action.worker] = replace(past, killed=action.run)
            case GiveUp():
                after[action.worker] = replace(past, given_up=action.run, given_up_at=now)
    return after


def restart_delay(worker: str, past: Past, policy: Policy) -> float:
    """Seconds from the last death to the next start.

    Spread by up to a quarter to either side, so that workers which died together do not start together; by
    how much follows from the arguments.
    """
    if past.deaths >= policy.max_deaths:
        delay = policy.retry_delay
    else:
        delay = backoff(policy.restart_delay, past.deaths - 1, policy.max_restart_delay)
    draw = zlib.crc32(f"{worker} {past.died_at!r}".encode()) / 2**32
    return delay * (0.75 + draw / 2)


def _decide(seen: Observation, past: Past, policy: Policy, now: float) -> Action | None:
    if seen.run < past.started:
        return None  # Seen before the last start was carried out.
    if seen.run == 0:
        return Start(seen.worker, 1, "it is to run")
    if seen.death is not None:
        return _after_death(seen, seen.death, past, policy, now)
    if seen.run <= past.killed:
        return None  # Killed, and not gone yet.
    reason = _why_kill(seen, policy)
    if reason is not None:
        return Kill(seen.worker, seen.run, reason)
    if seen.health is not None and seen.health.state is State.FAILED:
        return _after_failure(seen, seen.health, past, policy, now)
    return None


def _after_failure(
    seen: Observation, health: Health, past: Past, policy: Policy, now: float
) -> Action | None:
    if seen.run > past.given_up:
        return GiveUp(
            seen.worker,
            seen.run,
            f"its engine cannot be started: {health.last_fault}; "
            f"the next try is in {policy.retry_delay:.0f} s",
        )
    if not 0 <= now - past.given_up_at < policy.retry_delay:
        return Kill(seen.worker, seen.run, "its engine could not be started; trying again")
    return None


def _after_death(seen: Observation, death: str, past: Past, policy: Policy, now: float) -> Action | None:
    past = _see(past, seen, policy, now)
    delay = restart_delay(seen.worker, past, policy)
    # A negative time is a clock that was set back: no reason to wait for it to catch up.
    if not 0 <= now - past.died_at < delay:
        return Start(seen.worker, seen.run + 1, death)
    if past.deaths >= policy.max_deaths and seen.run > past.given_up:
        return GiveUp(
            seen.worker,
            seen.run,
            f"it died {past.deaths} times in a row, the last time so: {death}; "
            f"the next start is in {delay:.0f} s",
        )
    return None


def _why_kill(seen: Observation, policy: Policy) -> str | None:
    if seen.health is None:
        if seen.silence > policy.start_timeout:
            return f"it did not answer within {seen.silence:.0f} s of its start"
        return None
    if seen.silence > policy.unresponsive_timeout:
        return f"it has not answered for {seen.silence:.0f} s"
    state = seen.health.state
    busy = state is State.LOADING or (state is State.READY and seen.health.requests > 0)
    if busy and seen.health.last_progress > policy.progress_timeout:
        return f"it made no progress for {seen.health.last_progress:.0f} s and does not repair itself"
    return None


def _see(past: Past, seen: Observation, policy: Policy, now: float) -> Past:
    """Counts a death that was not counted yet."""
    if seen.death is not None and seen.run > past.dead:
        row = 0 if now - past.started_at >= policy.healthy_after else past.deaths
        past = replace(past, dead=seen.run, died_at=now, deaths=row + 1)
    if seen.health is not None and seen.health.state is State.READY:
        past = replace(past, ready=max(past.ready, seen.run))
    return past
