"""When is an engine dead, and when does the next one start? Decisions over plain data, without a clock."""

import signal
from dataclasses import dataclass

from moebius_common.backoff import backoff
from moebius_common.exit_reason import exit_reason
from moebius_proto.worker.v1 import engine_pb2, worker_pb2

# Signals for what a process did itself.
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


@dataclass(frozen=True, slots=True)
class Policy:
    """Times in seconds; the settings of the same names explain them."""

    stall_timeout: float
    load_stall_timeout: float
    restart_delay: float
    max_restart_delay: float
    healthy_after: float


@dataclass(frozen=True, slots=True)
class Observation:
    """What the front knows of an engine that has not been given up yet."""

    # The model is loaded.
    ready: bool
    # Seconds, of those in which the front itself was running, since the engine's last frame.
    silence: float
    # Set when the process is gone: its exit status, negative for a signal.
    exit_code: int | None = None
    # Set when the connection ended, or carries what cannot be understood.
    broken: str | None = None
    # The engine's last word, if it had one.
    fatal: engine_pb2.EngineFatal | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The engine is to be given up."""

    reason: worker_pb2.Reason
    message: str
    # Another start would end in the same way.
    permanent: bool = False
    # A kernel may have done it: the device failed, or the process was killed for what it did to memory.
    kernel_suspected: bool = False


def judge(seen: Observation, policy: Policy) -> End | None:
    """Why this engine must be given up; None if it lives."""
    if seen.fatal is not None:
        device_failed = seen.fatal.reason == worker_pb2.REASON_GPU_FAULT
        return End(seen.fatal.reason, seen.fatal.message, seen.fatal.permanent, device_failed)
    if seen.exit_code is not None:
        return End(
            worker_pb2.REASON_ENGINE_DEAD,
            _epitaph(seen.exit_code, seen.ready),
            kernel_suspected=-seen.exit_code in _FAULTS,
        )
    if seen.broken is not None:
        return End(worker_pb2.REASON_ENGINE_DEAD, seen.broken)
    limit = policy.stall_timeout if seen.ready else policy.load_stall_timeout
    if seen.silence > limit:
        doing = "no step and no heartbeat" if seen.ready else "no progress in loading"
        return End(
            worker_pb2.REASON_ENGINE_STALLED, f"{doing} for {seen.silence:.1f} s; the engine was killed"
        )
    return None


def deaths_in_a_row(before: int, ready_for: float | None, policy: Policy) -> int:
    """Counts this death; `ready_for`: seconds that the engine was ready, None if it never was."""
    if ready_for is not None and ready_for >= policy.healthy_after:
        return 1
    return before + 1


def restart_delay(deaths: int, policy: Policy, draw: float) -> float:
    """Seconds until the next start. Doubles with each death, spread by a quarter by `draw` in [0, 1)."""
    return backoff(policy.restart_delay, deaths - 1, policy.max_restart_delay) * (0.75 + draw / 2)


def _epitaph(exit_code: int, ready: bool) -> str:
    when = "" if ready else " while loading"
    hint = "; if nobody sent it, the machine ran out of memory" if exit_code == -signal.SIGKILL else ""
    return f"the engine {exit_reason(exit_code)}{when}{hint}"
