"""Operations that try every candidate at each new kind of call, and compute others with what has passed."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from moebius_kernels.calls import CALLS, key_of, named_arguments, shapes_of
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations
from moebius_kernels.plan import Verdict
from moebius_kernels.registry import Backend, Device, Query, Registry, TokenRange, refusal
from moebius_kernels.tensor_tree import copy_tensors
from moebius_worker.preflight.gates import MEMORY, Announce, Trial, again, judge
from moebius_worker.preflight.machine import Machine
from moebius_worker.preflight.report import Begun, Judged, Message, Site

# Who takes so many times the time of the best has lost, in its first call already.
_LOST = 4.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a gate may take: the first call, which compiles, and each of the others."""

    compile: float = 60.0
    run: float = 20.0


class _Proven(NamedTuple):
    """The best of a site's candidates."""

    function: Callable[..., Any]
    verdict: Verdict


# A call, by whatever has the operation's signature.
_Compute = Callable[[Callable[..., Any]], Any]


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
    # Sites that have been judged; None: no candidate passed.
    _proven: dict[Site, _Proven | None] = field(default_factory=dict)
    # Candidates keep what they keep from call to call, as in an engine: by operation, key and backend.
    _bound: dict[tuple[str, str, str], Callable[..., Any]] = field(default_factory=dict)
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
            return self._call(operation, arguments, lambda function: function(*args, **kwargs))

        return call

    def _call(self, operation: str, arguments: dict[str, Any], compute: _Compute) -> Any:
        call, reference = CALLS[operation], getattr(REFERENCE, operation)
        tokens = next(iter(arguments.values())).shape[0]
        span = next((one for one in self.ranges if one.first <= tokens <= one.last), None)
        query_arguments = shapes_of(operation, arguments)
        site = Site(operation, key_of(query_arguments), tokens, self.kind if call.step else "")
        if site in self._proven:
            return self._again(site, compute, reference)
        if span is None:
            return compute(reference)
        own = {*call.rows, *call.written}
        before = {name: copy_tensors(value) if name in own else value for name, value in arguments.items()}
        result = compute(reference)
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
        self._proven[site] = None
        for backend in sorted(self.registry.of(operation), key=lambda one: one.is_reference):
            verdict = self.known.get((site, backend.name))
            if verdict is None:
                needed = timed and (rivals or not backend.is_reference)
                verdict = self._verdict(backend, site, trial, timed=needed, enough=_LOST * best)
                self._say(site, verdict, suspect=_may_have_broken(verdict, trial, backend))
            if verdict.rejected is None:
                taken = verdict.microseconds or math.inf
                if not backend.is_reference and (not rivals or taken < best):
                    self._proven[site] = _Proven(self._bind(backend, site), verdict)
                rivals, best = True, min(best, taken)
        return result

    def _bind(self, backend: Backend, site: Site) -> Callable[..., Any]:
        key = site.operation, site.key, backend.name
        if key not in self._bound:
            self._bound[key] = backend.bind()
        return self._bound[key]

    def _again(self, site: Site, compute: _Compute, reference: Callable[..., Any]) -> Any:
        """A call of a site that has been judged. Its best candidate computes it, in a fraction of the
        reference's time; if it cannot, it has not passed after all."""
        if (proven := self._proven[site]) is not None:
            # It may be the first such call of this process, or one with other strides: compiled then.
            announce = self._announcing(site, proven.verdict.backend, self.patience.compile)
            result, verdict = again(proven.verdict, lambda: compute(proven.function), self.machine, announce)
            self._say(site, verdict, suspect=verdict.rejected is not None)
            if verdict.rejected is None:
                return result
            self._proven[site] = None
        return compute(reference)

    def _say(self, site: Site, verdict: Verdict, *, suspect: bool) -> None:
        """`suspect`: the device, or this process's use of it, may be the worse for what was tried."""
        lost = suspect and not self.machine.healthy()
        if lost and verdict.rejected not in (None, MEMORY):
            verdict = replace(verdict, rejected="crash", reason=f"{verdict.reason}: device lost")
        self.send(Judged(site, verdict))
        if lost:
            self.give_up()

    def _announcing(self, site: Site, backend: str, seconds: float, first: float | None = None) -> Announce:
        """`first`: seconds of the first call, if that may take longer."""

        def announce(gate: str) -> None:
            patience = first if first is not None and gate == "compile" else seconds
            self.send(Begun(site, backend, gate, patience))

        return announce

    def _verdict(self, backend: Backend, site: Site, trial: Trial, *, timed: bool, enough: float) -> Verdict:
        if reason := refusal(backend, trial.query):
            return Verdict(backend.name, "admission", reason)
        if broken := self._broken.get((site.operation, site.key, backend.name)):
            return Verdict(backend.name, "crash", broken)

        first = max(self.patience.compile, backend.build_seconds)
        announce = self._announcing(site, backend.name, self.patience.run, first)
        return judge(backend, trial, self.machine, announce, timed=timed, enough=enough)


def _may_have_broken(verdict: Verdict, trial: Trial, backend: Backend) -> bool:
    """Whether the device may be the worse for what was tried."""
    if verdict.rejected is None:
        # A reference that could not be captured.
        return trial.capture and backend.capturable and not verdict.captured
    return verdict.rejected not in ("admission", "numbers")
