"""When to act: the ladder, one table of rungs, and the pauses and limits that hold for all of them.

A look goes down the table, from top to bottom: the first rung whose trouble the worker has, and whose step
can be taken now, is what is done. Below the whole ladder is a rung that is not in it: a worker's front
restarts its engine by itself.
"""

import zlib
from dataclasses import dataclass

from moebius_common.backoff import backoff
from moebius_controller.types import Past, Step, Trouble


@dataclass(frozen=True, slots=True)
class Rung:
    """`when` says what `seconds` and `times` mean, if it uses them."""

    when: Trouble
    step: Step
    seconds: float = 0.0
    times: int = 1


LADDER = (
    Rung(Trouble.LOST_NODE, Step.FORCE, seconds=30),
    Rung(Trouble.DEVICE_LOST, Step.LEAVE_NODE),
    # The kubelet's probe and we ask the same, so this is no long time; a worker that is only slow still
    # answers.
    Rung(Trouble.SILENT, Step.REPLACE, seconds=10),
    Rung(Trouble.MUTE, Step.REPLACE, seconds=60),
    # A worker repairs a stalled engine itself, and much earlier; this is for one that fails to.
    Rung(Trouble.STUCK, Step.REPLACE, seconds=900),
    # More than a request that kills engines costs before it is refused.
    Rung(Trouble.ENGINE_DEATHS, Step.NEXT_LEVEL, times=5),
    Rung(Trouble.DEATHS, Step.NEXT_LEVEL, times=3),
    Rung(Trouble.FAILED, Step.NEXT_LEVEL),
    # Below the levels: most errors of a device are a kernel's, and a level without that kernel ends them.
    Rung(Trouble.DEVICE_FAULTS, Step.LEAVE_NODE, times=3),
    # Out of levels. What was given up is replaced when it was left alone for long enough.
    Rung(Trouble.ENGINE_DEATHS, Step.GIVE_UP, times=8),
    Rung(Trouble.ENGINE_DEATHS, Step.REPLACE, times=8),
    Rung(Trouble.DEATHS, Step.GIVE_UP, times=6),
    Rung(Trouble.FAILED, Step.GIVE_UP),
    # Also of one that does not take up the level that was set.
    Rung(Trouble.FAILED, Step.REPLACE, seconds=30),
    Rung(Trouble.BACK_OFF, Step.REPLACE, seconds=15),
    # StatefulSets replace pods that ended, mostly at once; Deployments leave them there.
    Rung(Trouble.ENDED, Step.REPLACE, seconds=10),
    Rung(Trouble.DEAD, Step.REPLACE),
)


@dataclass(frozen=True, slots=True)
class Policy:
    ladder: tuple[Rung, ...] = LADDER
    # From a death to the next start or replacement; doubles with each further death in a row.
    restart_delay: float = 0.25
    max_restart_delay: float = 30.0
    # A run that lived so long ends the row, and so does an engine.
    healthy_after: float = 300.0
    # How long a worker that was given up is left alone: what it lacked may be there again.
    retry_delay: float = 60.0
    # So many workers of a group are to stay ready: what serves is taken away only if there are more.
    min_ready: int = 1
    # For how long a group whose members are being replaced is left to that: a rollout that is stuck, or
    # stopped half-way on purpose, is not to keep the dead dead.
    rollout_patience: float = 1800.0
    # So many nodes may be marked at a time.
    max_marked_nodes: int = 1
    # For how long an error of a device speaks against its node.
    fault_memory: float = 3600.0
    # For how long a worker that is gone is remembered, since its successor may have its name.
    gone_memory: float = 3600.0


PROCESSES = Policy()
# A pod's place is made anew: it costs more than a process, and the kubelet tries again by itself.
PODS = Policy(restart_delay=1.0, max_restart_delay=60.0, retry_delay=600.0)


def restart_delay(worker: str, past: Past, policy: Policy) -> float:
    """Seconds from the last death, or from giving up, to the next start or replacement.

    Spread by up to a quarter to either side, so that workers which died together do not start together; by
    how much follows from the arguments.
    """
    if past.given_up_at:
        delay = policy.retry_delay
    elif past.deaths:
        delay = backoff(policy.restart_delay, past.deaths - 1, policy.max_restart_delay)
    else:
        return 0.0
    draw = zlib.crc32(f"{worker} {past.died_at!r}".encode()) / 2**32
    return delay * (0.75 + draw / 2)
