"""What an engine gets: operations that follow the plan, flights noted, late compilations counted."""

import os
import tempfile

import torch

from moebius_kernels.activations import SILU
from moebius_kernels.calls import key_of, named_arguments, shapes_of
from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Choice, Plan, Verdict
from moebius_kernels.registry import TokenRange
from moebius_worker.engine.runner import RunnerOptions
from moebius_worker.flight_recorder import read_flights
from moebius_worker.preflight import prepare
from moebius_worker.preflight.examine import Wanted
from tests.worker.preflight import bad

WANTED = Wanted(RunnerOptions(device="cpu"), excluded=("linear:fast",))
X = torch.randn(2, 8)


def _plan() -> Plan:
    key = key_of(shapes_of("gated", named_arguments("gated", (X, SILU), {})))
    verdicts = (
        Verdict("good"),
        Verdict("slow", "crash", "the process was killed by SIGSEGV"),
        Verdict("makes_nan", "numbers", "8 of 8 numbers are NaN"),
    )
    spans = (TokenRange(1, 1), TokenRange(2, 2))
    return Plan(tuple(Choice("gated", key, span, "good", False, verdicts) for span in spans), {})


def _prepared(monkeypatch, plan: Plan, flights: int) -> prepare.Prepared:
    monkeypatch.setattr(prepare, "gather", lambda: bad.registry("good", "slow", "makes_nan"))
    monkeypatch.setattr(prepare, "find_plan", lambda *_: plan)
    return prepare.prepare(None, WANTED, flights, lambda *_: None)


def test_operations_follow_the_plan_and_note_what_they_do(monkeypatch) -> None:
    with tempfile.TemporaryFile() as file:
        prepared = _prepared(monkeypatch, _plan(), file.fileno())
        torch.testing.assert_close(prepared.operations.gated(X, SILU), REFERENCE.gated(X, SILU))
        prepared.operations.l2_norm(X)
        flights = read_flights(file.fileno())
    assert [(flight.name, flight.tokens) for flight in flights] == [
        ("l2_norm:reference", 2),
        ("gated:good", 2),
    ]


def test_without_a_plan_the_references_are_called_without_a_detour(monkeypatch) -> None:
    with tempfile.TemporaryFile() as file:
        assert _prepared(monkeypatch, Plan(), file.fileno()).operations is REFERENCE
        assert os.fstat(file.fileno()).st_size == 0


def test_the_summary_counts_choices_and_rejections_with_a_reason(monkeypatch) -> None:
    with tempfile.TemporaryFile() as file:
        message = _prepared(monkeypatch, _plan(), file.fileno()).message()
    assert dict(message.backends) == {"gated:good": 2}
    assert [(one.backend, one.gate, one.count, one.reason) for one in message.rejections] == [
        ("gated:slow", "crash", 2, "the process was killed by SIGSEGV"),
        ("gated:makes_nan", "numbers", 2, "8 of 8 numbers are NaN"),
    ]
    assert list(message.excluded) == ["linear:fast"]


def test_compilations_after_the_freeze_are_counted(monkeypatch) -> None:
    listeners = []
    monkeypatch.setattr(prepare, "watch_compilations", listeners.append)
    with tempfile.TemporaryFile() as file:
        prepared = _prepared(monkeypatch, _plan(), file.fileno())
    assert not listeners
    prepared.freeze()
    assert prepared.late_compilations == 0
    [compiled] = listeners
    compiled("a kernel")
    compiled("another")
    assert prepared.late_compilations == 2
