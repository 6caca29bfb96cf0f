"""Runs the preflight: starts sacrificial processes until everything has been judged."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from io import RawIOBase
from typing import Any

import structlog

from moebius_common.child import dies_with_us
from moebius_common.exit_reason import exit_reason
from moebius_kernels.plan import Plan, Verdict
from moebius_kernels.registry import TokenRange
from moebius_worker.preflight.child import Task, encode_task
from moebius_worker.preflight.draw import draw_plan
from moebius_worker.preflight.probe import Patience
from moebius_worker.preflight.report import Begun, Doing, Judged, Site, StepDone, decode
from moebius_worker.preflight.subject import ProbeStep

# What is being done, and how many of how many steps are.
Progress = Callable[[str, int, int], None]

# Seconds without a word from a process that tries no candidate: it loads weights, or computes a reference.
SILENCE_SECONDS = 300.0
# Processes that may end in a row without having judged anything.
FRUITLESS_PROCESSES = 2
# Seconds that a process may take to end.
EXIT_SECONDS = 10.0

log = structlog.get_logger(__name__)


class PreflightError(Exception):
    """The model itself cannot be run here, whatever the candidates do."""


@dataclass(frozen=True)
class Examination:
    """What is to be examined and how; the fields are those of `Task`."""

    subject: str
    options: dict[str, Any]
    ranges: tuple[TokenRange, ...]
    steps: tuple[ProbeStep, ...]
    capture_tokens: int = 0
    registry: str = "moebius_kernels.registry:gather"
    excluded: tuple[str, ...] = ()
    patience: Patience = field(default_factory=Patience)


@dataclass
class _Known:
    verdicts: dict[tuple[Site, str], Verdict]
    steps_done: int = 0

    def add(self, judged: Judged) -> None:
        self.verdicts[judged.site, judged.verdict.backend] = judged.verdict


def preflight(
    examination: Examination,
    identity: dict[str, str],
    progress: Progress = lambda phase, done, total: None,
) -> Plan:
    """Judges every candidate and draws up the plan. Raises PreflightError."""
    known = _Known({})
    fruitless = 0
    total = len(examination.steps)
    while known.steps_done < total:
        before = len(known.verdicts), known.steps_done
        ended = _one_process(_task(examination, known), known, progress)
        if ended is None:
            break
        log.warning("a preflight process ended", reason=ended, steps_done=known.steps_done, steps=total)
        fruitless = fruitless + 1 if before == (len(known.verdicts), known.steps_done) else 0
        if fruitless == FRUITLESS_PROCESSES:
            step = examination.steps[known.steps_done]
            raise PreflightError(
                f"The model cannot be computed here: a {step.kind} step of {step.tokens} tokens, with "
                f"references alone, {ended}."
            )
    return draw_plan(
        known.verdicts, examination.ranges, capture_tokens=examination.capture_tokens, identity=identity
    )


def _task(examination: Examination, known: _Known) -> Task:
    return Task(
        **{one.name: getattr(examination, one.name) for one in fields(examination)},
        first_step=known.steps_done,
        known=tuple(Judged(site, verdict) for (site, _), verdict in known.verdicts.items()),
    )


def _one_process(task: Task, known: _Known, progress: Progress) -> str | None:
    """Lets a process judge as long as it lives; None if it did all, else how it ended."""
    reading, writing = os.pipe()
    command = dies_with_us(sys.executable, "-m", "moebius_worker.preflight.child", "--fd", str(writing))
    with (
        os.fdopen(reading, "rb", buffering=0) as reports,
        # A session of its own: compilers that it started end with it.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=(writing,), start_new_session=True
        ) as process,
    ):
        os.close(writing)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(encode_task(task))
            trying, hung = _listen(reports, known, progress, len(task.steps))
            if not hung:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    how = f"said nothing for {SILENCE_SECONDS:.0f} s" if hung else exit_reason(status)
    if trying is not None:
        how = f"took more than {trying.seconds:.0f} s" if hung else how
        verdict = Verdict(trying.backend, "crash", f"the process {how} at the gate {trying.gate}")
        known.add(Judged(trying.site, verdict))
    return None if known.steps_done == len(task.steps) else how


def _listen(reports: RawIOBase, known: _Known, progress: Progress, total: int) -> tuple[Begun | None, bool]:
    """Takes reports until there are no more: what was being tried then, and whether it took too long."""
    trying: Begun | None = None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        while True:
            seconds = SILENCE_SECONDS if trying is None else trying.seconds
            if not selector.select(seconds):
                return trying, True
            data = reports.read(65536)
            if not data:
                return trying, False
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                match decode(line):
                    case Begun() as trying:
                        doing = f"{trying.site.operation}:{trying.backend}, {trying.site.tokens} tokens"
                        progress(f"preflight: {doing}", known.steps_done, total)
                    case Judged() as judged:
                        trying = None
                        known.add(judged)
                    case StepDone(done=done):
                        known.steps_done = done
                    case Doing(phase=phase):
                        progress(f"preflight: {phase}", known.steps_done, total)
