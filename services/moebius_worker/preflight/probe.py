"""Operations that compute with the references and, at each new kind of call, try every candidate."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from moebius_kernels.calls import CALLS, key_of, named_arguments, shapes_of
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations
from moebius_kernels.plan import Verdict
from moebius_kernels.registry import Backend, Device, Query, Registry, TokenRange, refusal
from moebius_kernels.tensor_tree import copy_tensors
from moebius_worker.preflight.gates import Trial, judge
from moebius_worker.preflight.machine import Machine
from moebius_worker.preflight.report import Begun, Judged, Message, Site

# Who takes so many times the time of the best has lost, in its first call already.
_LOST = 4.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a gate may take: the first call, which compiles, and each of the others."""

    compile: float = 60.0
    run: float = 20.0


def _end_process() -> NoReturn:
    os._exit(1)


@dataclass
class Probe:
    """Judges as the model runs. `known`: verdicts of processes before this one, which are not sought again.

    `kind` is that of the current step; `capture_tokens`: steps of up to so many tokens are to be CUDA graphs.
    """

    registry: Registry
    ranges: Sequence[TokenRange]
    device: Device
    machine: Machine
    send: Callable[[Message], None]
    capture_tokens: int = 0
    # Ends a process on whose device nothing can be computed any more.
    give_up: Callable[[], NoReturn] = _end_process
    patience: Patience = field(default_factory=Patience)
    known: Mapping[tuple[Site, str], Verdict] = field(default_factory=dict)
    kind: str = ""
    _judged: set[Site] = field(default_factory=set)
    # Why a backend is not tried with a key: it broke the process at fewer tokens.
    _broken: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (site, backend), verdict in self.known.items():
            if verdict.rejected == "crash":
                self._broken[site.operation, site.key, backend] = f"at {site.tokens} tokens, {verdict.reason}"

    def operations(self) -> Operations:
        return Operations(**{name: self._probed(name) for name in OPERATION_NAMES})

    def _probed(self, operation: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = named_arguments(operation, args, kwargs)
            return self._call(operation, arguments, lambda: getattr(REFERENCE, operation)(*args, **kwargs))

        return call

    def _call(self, operation: str, arguments: dict[str, Any], reference: Callable[[], Any]) -> Any:
        call = CALLS[operation]
        tokens = next(iter(arguments.values())).shape[0]
        span = next((one for one in self.ranges if one.first <= tokens <= one.last), None)
        query_arguments = shapes_of(operation, arguments)
        site = Site(operation, key_of(query_arguments), tokens, self.kind if call.step else "")
        if span is None or site in self._judged:
            return reference()
        self._judged.add(site)
        own = {*call.rows, *call.written}
        before = {name: copy_tensors(value) if name in own else value for name, value in arguments.items()}
        result = reference()
        query = Query(operation, query_arguments, span, self.device)
        trial = Trial(
            query,
            before,
            result,
            {name: arguments[name] for name in call.written},
            capture=tokens <= self.capture_tokens and (not call.step or self.kind == "decode"),
        )
        # Only the last count of a range is timed, and the reference only where it has a rival.
        timed = tokens == span.last
        rivals = False
        best = math.inf
        for backend in sorted(self.registry.of(operation), key=lambda one: one.is_reference):
            verdict = self.known.get((site, backend.name))
            if verdict is None:
                needed = timed and (rivals or not backend.is_reference)
                verdict = self._verdict(backend, site, trial, timed=needed, enough=_LOST * best)
                lost = _may_have_broken(verdict, trial, backend) and not self.machine.healthy()
                if lost and verdict.rejected is not None:
                    verdict = replace(verdict, rejected="crash", reason=f"{verdict.reason}: device lost")
                self.send(Judged(site, verdict))
                if lost:
                    self.give_up()
            if verdict.rejected is None:
                rivals, best = True, min(best, verdict.microseconds or math.inf)
        return result

    def _verdict(self, backend: Backend, site: Site, trial: Trial, *, timed: bool, enough: float) -> Verdict:
        if reason := refusal(backend, trial.query):
            return Verdict(backend.name, "admission", reason)
        if broken := self._broken.get((site.operation, site.key, backend.name)):
            return Verdict(backend.name, "crash", broken)

        def announce(gate: str) -> None:
            seconds = self.patience.run
            if gate == "compile":
                seconds = max(self.patience.compile, backend.build_seconds)
            self.send(Begun(site, backend.name, gate, seconds))

        return judge(backend, trial, self.machine, announce, timed=timed, enough=enough)


def _may_have_broken(verdict: Verdict, trial: Trial, backend: Backend) -> bool:
    """Whether the device, or this process's use of it, may be the worse for what was tried."""
    if verdict.rejected is None:
        # A reference that could not be captured.
        return trial.capture and backend.capturable and not verdict.captured
    return verdict.rejected not in ("admission", "numbers")
