"""What is remembered of workers from look to look."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebius_controller.policy import Policy
from moebius_controller.types import (
    Action,
    DeviceFault,
    GiveUp,
    History,
    MarkNode,
    Observation,
    Past,
    Replace,
    SetLevel,
    Start,
    State,
)

DEVICE_FAULT = "GPU_FAULT"
KEPT_FAULTS = 8
LONGEST_TEXT = 200

# How drivers and libraries speak of a device that is gone or broken: NVIDIA's Xid messages, CUDA's and NVML's
# error strings. Not among them: illegal accesses and the like, which kernels commit.
_LOST = re.compile(
    r"\bxid\b|fallen off the bus|gpu is lost|no cuda-capable device|cudaErrorDevicesUnavailable"
    r"|devices? (is|are) busy or unavailable|uncorrectable|\becc\b|nvlink error|hardware error",
    re.IGNORECASE,
)


def see(past: Past | None, seen: Observation, policy: Policy, now: float) -> Past:
    """The past of a worker with this look in it. None: it was never seen before."""
    if past is None:
        past = _first_sight(seen)
    elif seen.run and past.revision != seen.revision:
        past = _other_revision(past, seen)
    news = seen.death if seen.death is not None and seen.run > past.dead else ""
    past = _count_deaths(past, seen, policy, now)
    if _LOST.search(news):
        past = _fault(past, seen, news, now)
    if seen.node_fault and not seen.ready and not any(fault.run == seen.run for fault in past.faults):
        past = _fault(past, seen, f"the node reports: {seen.node_fault}", now, lost=True)
    if seen.run > past.seen:
        past = replace(past, seen=seen.run, started_at=now, failed_at=0.0)
    if seen.ready:
        past = _with(past, ready=max(past.ready, seen.run))
        if now - past.started_at >= policy.healthy_after:
            past = _with(past, deaths=0, given_up_at=0.0)
    failed = seen.death is None and seen.health is not None and seen.health.state is State.FAILED
    past = _with(
        past,
        failed_at=(past.failed_at or now) if failed else 0.0,
        rolling_at=(past.rolling_at or now) if seen.rolling else 0.0,
        gone_at=0.0,
    )
    return _hear(past, seen, policy, now)


def _with(past: Past, **changes: Any) -> Past:
    """`replace`, but nothing new where nothing changes, which is most of the time."""
    return (
        past if all(getattr(past, name) == new for name, new in changes.items()) else replace(past, **changes)
    )


def remember(
    history: History,
    observations: Sequence[Observation],
    actions: Sequence[Action],
    policy: Policy,
    now: float,
) -> dict[str, Past]:
    """The history after `actions`, which were decided on `observations`, were carried out."""
    by_name = {seen.worker: seen for seen in observations}
    after = {name: see(history.get(name), seen, policy, now) for name, seen in by_name.items()}
    for action in actions:
        past = after[action.worker]
        after[action.worker] = _did(past, action, by_name[action.worker], policy, now)
    return after | _gone(history, after, policy, now)


def _first_sight(seen: Observation) -> Past:
    """Whatever happened before was not seen, and speaks against nobody."""
    return Past(
        dead=max(0, seen.run - 1),
        engine_run=seen.run,
        engine_base=seen.health.engine_restarts if seen.health else 0,
        engine_restarts=seen.health.engine_restarts if seen.health else 0,
        level=seen.level,
        level_body=seen.body,
        revision=seen.revision,
    )


def _other_revision(past: Past, seen: Observation) -> Past:
    """Which runs were dealt with stays true, and what is known of nodes; the rest was about another one."""
    return Past(
        started=past.started,
        seen=past.seen,
        ready=past.ready,
        dead=past.dead,
        replaced=past.replaced,
        revision=seen.revision,
        faults=past.faults,
        marked=past.marked,
        marked_at=past.marked_at,
    )


def _count_deaths(past: Past, seen: Observation, policy: Policy, now: float) -> Past:
    """Those that were not counted yet. What we took away was counted then."""
    over = seen.run if seen.death is not None else seen.run - 1
    if over <= past.dead or over < seen.body:
        return past
    deaths = over - max(past.dead, past.replaced, seen.body - 1)
    past = replace(past, dead=over)
    if deaths <= 0:
        return past
    row = _row(past, policy, now)
    # One all the same, if it is the first: what ends at once is not to be started without a pause.
    return replace(past, died_at=now, deaths=max(row, 1) if seen.blameless else row + deaths)


def _row(past: Past, policy: Policy, now: float) -> int:
    """Deaths in a row before one that happens now."""
    return 0 if now - past.started_at >= policy.healthy_after else past.deaths


def _hear(past: Past, seen: Observation, policy: Policy, now: float) -> Past:
    """What the worker says of its engine."""
    health = seen.health
    if seen.death is not None or health is None:
        return past
    if seen.run != past.engine_run:
        past = replace(past, engine_run=seen.run, engine_base=0, engine_restarts=0, engine_at=now)
    if health.level != past.engine_level:
        # Taking up a level is a restart as well; and deaths on another one say nothing about this one.
        past = replace(past, engine_level=health.level, engine_base=health.engine_restarts)
    if health.engine_restarts > past.engine_restarts:
        past = replace(past, engine_restarts=health.engine_restarts, engine_at=now)
    elif seen.ready and past.engine_deaths and now - past.engine_at >= policy.healthy_after:
        past = replace(past, engine_base=past.engine_restarts)
    if health.levels != past.levels and health.levels:
        past = replace(past, levels=health.levels)
    if health.fault_reason == DEVICE_FAULT and health.fault_at != past.fault_at:
        past = replace(past, fault_at=health.fault_at)
        if now - health.fault_at < policy.fault_memory:
            past = _fault(past, seen, health.last_fault, now)
    return past


def _fault(past: Past, seen: Observation, text: str, now: float, *, lost: bool = False) -> Past:
    lost = lost or _LOST.search(text) is not None
    fault = DeviceFault(seen.node, seen.run, now, lost, text[:LONGEST_TEXT])
    # One of a run accuses its node, and one more that the device was lost; the words of others were told.
    others = [
        one if one.run == seen.run else replace(one, text="")
        for one in past.faults
        if one.run != seen.run or (one.lost and not lost)
    ]
    return replace(past, faults=(*others, fault)[-KEPT_FAULTS:])


def _did(past: Past, action: Action, seen: Observation, policy: Policy, now: float) -> Past:
    match action:
        case Start():
            return replace(past, started=action.run, given_up_at=0.0)
        case Replace():
            if action.force:
                return replace(past, forced=action.run)
            # One that is moved, or tried again after it was given up, did not die.
            if action.run > past.dead and not action.drain and not past.given_up_at:
                past = replace(past, died_at=now, deaths=_row(past, policy, now) + 1)
            return replace(past, replaced=action.run, given_up_at=0.0)
        case SetLevel():
            past = replace(past, level_body=seen.body)
            if action.level == past.level:
                return past
            return replace(
                past,
                level=action.level,
                level_at=now,
                level_reason=action.cause.reason[:LONGEST_TEXT],
                deaths=0,
                engine_base=past.engine_restarts,
                given_up_at=0.0,
            )
        case MarkNode():
            return replace(past, marked=action.node, marked_at=now)
        case GiveUp():
            return replace(past, given_up_at=now)


def _gone(history: History, there: Mapping[str, Past], policy: Policy, now: float) -> dict[str, Past]:
    """Those that are not there, until they are forgotten."""
    absent = {
        name: past if past.gone_at else replace(past, gone_at=now)
        for name, past in history.items()
        if name not in there
    }
    return {name: past for name, past in absent.items() if 0 <= now - past.gone_at < policy.gone_memory}
