"""The gates that a candidate passes with the arguments of a real call, one after another."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moebius_kernels.calls import CALLS
from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Verdict
from moebius_kernels.registry import Backend, Query
from moebius_kernels.router import RANKINGS, Route
from moebius_kernels.sampling import Drawn
from moebius_kernels.tensor_tree import copy_tensors, tensors_of
from moebius_worker.preflight.compare import difference, limit_of
from moebius_worker.preflight.compare_draws import draw_difference
from moebius_worker.preflight.compare_routes import route_difference
from moebius_worker.preflight.machine import Machine, ran_out

# Told before each gate; the first call may have to compile.
Announce = Callable[[str], None]
# Repeats a captured call.
Replay = Callable[[], None]

_ALLOCATING = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    }
)

# What stands for a gate where the device had no memory left: that says little of a candidate.
MEMORY = "memory"

# Calls that are timed together, where they are captured.
_ROW = 8
# Microseconds that a graph of one call may take beyond that call.
_LAUNCH = 100.0


class _RejectedError(Exception):
    def __init__(self, gate: str, reason: str) -> None:
        super().__init__(reason)
        self.gate, self.reason = gate, reason


@dataclass(frozen=True, slots=True)
class Trial:
    """A call as the model makes it, before it was computed, and what came of it by the reference.

    `arguments` by name. `expected`: the result, and the arguments in `Call.written` as they were left.
    """

    query: Query
    arguments: Mapping[str, Any]
    expected: Any
    written: Mapping[str, Any]
    # The call's step is to be a CUDA graph.
    capture: bool

    @property
    def first(self) -> torch.Tensor:
        """The first argument: what choices are made from."""
        tensor: torch.Tensor = next(iter(self.arguments.values()))
        return tensor


def judge(
    backend: Backend,
    trial: Trial,
    machine: Machine,
    announce: Announce,
    *,
    timed: bool,
    enough: float = math.inf,
) -> Verdict:
    """Puts the candidate through the gates. What does not come back from that is the caller's to notice.
    `enough`: microseconds with which it has lost, however many more it takes.

    The reference is right by definition, and stays if it cannot be captured: somebody has to compute.
    """
    # Whoever left one, it was not this candidate.
    machine.latched_error()
    error: float | None = None
    microseconds: float | None = None
    run: _Run | None = None
    replay: Replay | None = None
    try:
        if not backend.is_reference:
            error = _compute(backend, trial, machine, announce)
        if trial.capture and machine.captures and backend.capturable:
            try:
                with _gate("capture", announce):
                    run, replay = _capture(backend, trial, machine)
                _no_error_left(machine)
            except _RejectedError as rejected:
                if not backend.is_reference or rejected.gate == MEMORY:
                    raise
        if timed:
            with _gate("time", announce):
                run = run or _Run(backend, trial)
                microseconds = _microseconds(run, replay, machine, enough)
                machine.synchronise()
            _no_error_left(machine)
    except _RejectedError as rejected:
        return Verdict(backend.name, rejected.gate, rejected.reason, error)
    return Verdict(backend.name, None, None, error, microseconds, replay is not None)


def again(
    verdict: Verdict, compute: Callable[[], Any], machine: Machine, announce: Announce
) -> tuple[Any, Verdict]:
    """A later call like the one that a candidate passed with this `verdict`: its result, and what is to be
    said of the candidate now."""
    machine.latched_error()
    try:
        with _gate("again", announce):
            result = compute()
            machine.synchronise()
        _no_error_left(machine)
    except _RejectedError as rejected:
        return None, Verdict(verdict.backend, rejected.gate, rejected.reason, verdict.error)
    return result, verdict


def _compute(backend: Backend, trial: Trial, machine: Machine, announce: Announce) -> float:
    """The relative error of the first call."""
    with _gate("compile", announce):
        run = _Run(backend, trial)
        with _PoisonedMemory():
            result = run()
        machine.synchronise()
    _no_error_left(machine)
    with _gate("numbers", announce):
        if backend.reference is None:
            return _compare(trial, run, result, limit_of(trial.query))
        declared = replace(backend, function=backend.reference, own=None)
        expected = replace(trial, expected=_Run(declared, trial)())
        return _compare(expected, run, result, limit_of(trial.query, declared=True))


class _Run:
    """The call on its own copies of everything that it reads in rows or writes; weights are shared."""

    def __init__(self, backend: Backend, trial: Trial) -> None:
        call = CALLS[trial.query.operation]
        own = {*call.rows, *call.written}
        self.arguments = {
            name: copy_tensors(value) if name in own else value for name, value in trial.arguments.items()
        }
        self._function = backend.bind()
        self._args, self._kwargs = _as_called(trial.query.operation, self.arguments)

    def __call__(self) -> Any:
        return self._function(*self._args, **self._kwargs)

    def written(self, trial: Trial) -> dict[str, Any]:
        return {name: self.arguments[name] for name in CALLS[trial.query.operation].written}


def _compare(trial: Trial, run: _Run, result: Any, limit: float) -> float:
    """The relative error of the result and of what was written."""
    match trial.expected:
        case Route():
            ranking = RANKINGS[trial.query.operation](**trial.arguments)
            error, wrong = route_difference(result, trial.expected, ranking)
        case Drawn():
            error, wrong = draw_difference(result, trial.expected, trial.first, trial.arguments["draws"])
        case _:
            error, wrong = difference(result, trial.expected, limit)
    if wrong is None:
        left, wrong = difference(run.written(trial), trial.written, limit)
        error = max(error, left)
        wrong = wrong and f"in what it writes: {wrong}"
    if wrong is None and (touched := _touched(trial, run)):
        wrong = f"it changed {touched}"
    if wrong is not None:
        raise _RejectedError("numbers", wrong)
    return error


def _touched(trial: Trial, run: _Run) -> str:
    """Arguments that it was to leave as they are, and did not."""
    call = CALLS[trial.query.operation]
    return ", ".join(
        name
        for name in call.rows
        if name not in call.written
        and not all(
            torch.equal(one.nan_to_num(), other.nan_to_num())
            for one, other in zip(
                tensors_of(run.arguments[name]), tensors_of(trial.arguments[name]), strict=True
            )
        )
    )


def _microseconds(run: Callable[[], Any], replay: Replay | None, machine: Machine, enough: float) -> float:
    """Of a call; of captured ones (`replay`: of one) in a row, which is how a graph has them: one alone takes
    less than its launch."""
    if replay is None:
        return machine.microseconds(run, enough)
    if enough < math.inf and (alone := machine.microseconds(replay, enough + _LAUNCH)) > enough + _LAUNCH:
        return alone

    def row() -> None:
        for _ in range(_ROW):
            run()

    replay_row, _ = machine.capture(row)
    # The first replay has more to do; and what can be captured does not take long.
    return machine.microseconds(replay_row, math.inf) / _ROW


def _capture(backend: Backend, trial: Trial, machine: Machine) -> tuple[_Run, Replay]:
    """Captures the call, gives its inputs other contents, and holds the replay against a plain call with
    those: what was read at the time of the capture shows."""
    static, plain = _Run(backend, trial), _Run(backend, trial)
    replay, result = machine.capture(static)
    _change_rows(trial, plain)
    for mine, other in zip(tensors_of(static.arguments), tensors_of(plain.arguments), strict=True):
        if mine is not other:
            mine.copy_(other)
    replay()
    machine.synchronise()
    expected = plain()
    machine.synchronise()
    limit = limit_of(trial.query)
    pairs = [(result, expected), (static.written(trial), plain.written(trial))]
    for found, wanted in pairs:
        match wanted:
            # The same program chose twice.
            case Route():
                _, wrong = difference(found.experts, wanted.experts, 0.0)
                wrong = wrong or difference(found.weights, wanted.weights, limit)[1]
            case Drawn():
                _, wrong = difference((found.token_ids, found.best), (wanted.token_ids, wanted.best), 0.0)
            case _:
                _, wrong = difference(found, wanted, limit)
        if wrong is not None:
            raise _RejectedError("capture", f"its replay differs from a plain call: {wrong}")
    return static, replay


def _change_rows(trial: Trial, run: _Run) -> None:
    """Every row gets the one before it, and numbers become smaller: signs, which mean something to some
    operations, stay, and so do indices."""
    for name in CALLS[trial.query.operation].rows:
        for tensor in tensors_of(run.arguments[name]):
            changed = tensor.roll(1, 0)
            tensor.copy_(changed * 0.75 if tensor.is_floating_point() else changed)


def _as_called(operation: str, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name as positional ones and those that have to be named."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in signature(getattr(REFERENCE, operation)).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = arguments[name]
        else:
            positional.append(arguments[name])
    return positional, named


@contextmanager
def _gate(name: str, announce: Announce) -> Iterator[None]:
    announce(name)
    try:
        yield
    except _RejectedError:
        raise
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        gate = MEMORY if ran_out(error) else name
        raise _RejectedError(gate, f"{type(error).__name__}: {message}") from error


def _no_error_left(machine: Machine) -> None:
    if left := machine.latched_error():
        raise _RejectedError("latched", f"it left an error behind: {left}")


class _PoisonedMemory(TorchFunctionMode):
    """Memory that is allocated is full of ones, which are NaN in every float: what is not written shows."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        if function in _ALLOCATING:
            memory = torch.empty(0, dtype=torch.uint8, device=result.device)
            memory.set_(result.untyped_storage()).fill_(255)
        return result
