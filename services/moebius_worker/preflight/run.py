"""Runs the preflight: compiles on all CPUs, starts sacrificial processes until everything has been judged.

Both start at the same time. While kernels are compiled, the first sacrificial process makes ready.
"""

import os
import selectors
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from io import RawIOBase
from typing import Any

import structlog

from moebius_common.exit_reason import exit_reason
from moebius_kernels.plan import Plan, Verdict
from moebius_kernels.registry import TokenRange
from moebius_worker.preflight.child import Task, encode_task
from moebius_worker.preflight.draw import draw_plan
from moebius_worker.preflight.gates import MEMORY
from moebius_worker.preflight.probe import Patience
from moebius_worker.preflight.process import PreflightProcess, Waiting
from moebius_worker.preflight.report import Begun, Compiled, Doing, Judged, RanOut, Site, StepDone, decode
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


class PreflightMemoryError(PreflightError):
    """Not even references have room on the GPU. `said`: by the device."""

    def __init__(self, said: str) -> None:
        super().__init__(
            "The GPU's memory ran out in the preflight. Free what other processes took, or ask for less: a "
            f"smaller model, --max-step-tokens, --max-running. The device said: {said}"
        )
        self.said = said


@dataclass(frozen=True)
class Examination:
    """What is to be examined and how; the fields are those of `Task`."""

    subject: str
    options: dict[str, Any]
    ranges: tuple[TokenRange, ...]
    steps: tuple[ProbeStep, ...]
    capture_tokens: int = 0
    sizes: str | None = None
    registry: str = "moebius_kernels.registry:gather"
    excluded: tuple[str, ...] = ()
    patience: Patience = field(default_factory=Patience)


@dataclass
class _Known:
    verdicts: dict[tuple[Site, str], Verdict]
    steps_done: int = 0
    # What the device said when the memory of the last process ran out.
    ran_out: str | None = None
    # What came of compiling ahead, once that is over.
    compiled: Compiled | None = None

    def add(self, judged: Judged) -> None:
        self.verdicts[judged.site, judged.verdict.backend] = judged.verdict


def preflight(
    examination: Examination,
    identity: dict[str, str],
    progress: Progress = lambda phase, done, total: None,
    meanwhile: Callable[[], None] = lambda: None,
    waiting: Waiting | None = None,
) -> Plan:
    """Judges every candidate and draws up the plan. `meanwhile`: what can be done while kernels are compiled.
    `waiting`: processes that were started before, of which some are taken.

    Raises PreflightError, and what `meanwhile` raises.
    """
    waiting = {} if waiting is None else waiting
    known = _Known({})
    fruitless = 0
    total = len(examination.steps)
    with _compiling(_task(examination, known), known, progress, meanwhile, waiting) as compiled:
        while known.steps_done < total:
            before = dict(known.verdicts), known.steps_done
            known.ran_out = None
            ended = _one_process(_task(examination, known), known, progress, compiled, waiting)
            if ended is None:
                break
            reason = known.ran_out or ended
            log.warning("a preflight process ended", reason=reason, steps_done=known.steps_done, steps=total)
            fruitless = fruitless + 1 if before == (known.verdicts, known.steps_done) else 0
            if fruitless == FRUITLESS_PROCESSES:
                if known.ran_out is not None:
                    raise PreflightMemoryError(known.ran_out)
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
        environment=dict(os.environ),
    )


def compile_ahead(examination: Examination, progress: Progress) -> Compiled:
    """Compiles what `preflight` would try, and tries nothing. Raises PreflightError."""
    known = _Known({})
    with _process("ahead", _task(examination, known), {}) as process:
        process.begin()
        _, hung = _listen(process.reports, known, progress, len(examination.steps))
        if not hung:
            process.wait(EXIT_SECONDS)
        status = process.end()
    if status != 0 or known.compiled is None:
        how = f"said nothing for {SILENCE_SECONDS:.0f} s" if hung else exit_reason(status)
        raise PreflightError(f"The process that compiles {how}.")
    return known.compiled


@contextmanager
def _compiling(
    task: Task, known: _Known, progress: Progress, meanwhile: Callable[[], None], waiting: Waiting
) -> Iterator[Callable[[], None]]:
    """Has kernels compiled; yields what does something else `meanwhile` and waits until all are, or nobody
    says anything any more: then compiling is over, and another call does nothing."""
    if task.sizes is None or not task.steps:
        yield lambda: None
        return
    with _process("ahead", task, waiting) as process:
        process.begin()

        def wait() -> None:
            if not process.reports.closed:
                meanwhile()
                _listen(process.reports, known, progress, len(task.steps))
                process.end()
                if known.compiled is not None and known.compiled.reason:
                    # The candidates concerned are compiled, or fail, when they are tried.
                    log.warning("not all was compiled before the preflight", result=str(known.compiled))

        yield wait


def _one_process(
    task: Task, known: _Known, progress: Progress, compiled: Callable[[], None], waiting: Waiting
) -> str | None:
    """Lets a process judge as long as it lives, once kernels are `compiled`; None if it did all, else how it
    ended."""
    with _process("child", task, waiting) as process:
        compiled()
        process.begin()
        trying, hung = _listen(process.reports, known, progress, len(task.steps))
        ended = not hung and process.wait(EXIT_SECONDS)
        status = process.end()
    how = f"said nothing for {SILENCE_SECONDS:.0f} s" if hung else exit_reason(status)
    if trying is not None:
        how = f"took more than {trying.seconds:.0f} s" if hung else how
        # Whoever is short of memory kills so, whatever was being tried.
        gate = MEMORY if ended and status == -signal.SIGKILL else "crash"
        verdict = Verdict(trying.backend, gate, f"the process {how} at the gate {trying.gate}")
        known.add(Judged(trying.site, verdict))
    return None if known.steps_done == len(task.steps) else how


@contextmanager
def _process(program: str, task: Task, waiting: Waiting) -> Iterator[PreflightProcess]:
    """One that has its task: that which is waiting for one, or another. It is gone at the end."""
    process = waiting.pop(program, None) or PreflightProcess.start(program)
    try:
        process.give(encode_task(task))
        yield process
    finally:
        process.end()


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
                    case RanOut(said=said):
                        known.ran_out = said
                    case StepDone(done=done):
                        known.steps_done = done
                    case Compiled() as compiled:
                        known.compiled = compiled
                    case Doing(phase=phase):
                        progress(f"preflight: {phase}", known.steps_done, total)
