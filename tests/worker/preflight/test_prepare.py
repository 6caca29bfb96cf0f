"""What an engine gets: operations that follow the plan, flights noted, late compilations counted."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from structlog.testing import capture_logs

from moebius_kernels.activations import SILU
from moebius_kernels.calls import key_of, named_arguments, shapes_of
from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Choice, Plan, Verdict, token_ranges
from moebius_kernels.registry import TokenRange
from moebius_kernels.sampling import Draws
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.probation import Probation
from moebius_worker.engine.runner import Computed, RunnerOptions
from moebius_worker.engine.types import Slice
from moebius_worker.flight_recorder import read_flights, suspect
from moebius_worker.preflight import prepare
from moebius_worker.preflight.examine import Wanted
from moebius_worker.preflight.run import Examination
from moebius_worker.preflight.subject import steps_for
from tests.worker.preflight import bad

STEPS = steps_for(token_ranges(16), max_running=4, max_step_tokens=16)
WANTED = Wanted(RunnerOptions(device="cpu"), excluded=("gated:slow",))
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


def _prepared(monkeypatch, plan: Plan, flights: int, watch: Probation | None = None) -> prepare.Prepared:
    monkeypatch.setattr(prepare, "gather", lambda: bad.registry("good", "slow", "makes_nan"))
    monkeypatch.setattr(prepare, "find_plan", lambda *_, **__: plan)
    monkeypatch.setattr(prepare, "examination_for", lambda *_: Examination("", {}, (), STEPS))
    return prepare.prepare(None, WANTED, flights, lambda *_: None, watch=watch)


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


def test_on_probation_a_death_between_operations_is_nobodys(monkeypatch) -> None:
    with tempfile.TemporaryFile() as file:
        prepared = _prepared(monkeypatch, _plan(), file.fileno(), Probation(60, lambda: None))
        prepared.operations.gated(X, SILU)
        flights = read_flights(file.fileno())
    assert [flight.name for flight in flights] == ["none:reference", "gated:good"]
    assert suspect(flights) is None


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
    assert list(message.excluded) == ["gated:slow"]


def test_names_that_exclude_nothing_are_warned_of_and_not_passed_on(monkeypatch) -> None:
    asked: list[Wanted] = []
    monkeypatch.setattr(prepare, "gather", lambda: bad.registry("good", "slow"))
    monkeypatch.setattr(prepare, "find_plan", lambda _, wanted, *__, **___: asked.append(wanted) or Plan())
    wanted = replace(WANTED, excluded=("gated:slwo", "gated:slow", "gated:reference"))
    with capture_logs() as lines:
        prepared = prepare.prepare(None, wanted, -1, lambda *_: None)
    warned = {line["backend"]: line["reason"] for line in lines if line["log_level"] == "warning"}
    assert warned == {
        "gated:slwo": "of gated there are here: good, slow",
        "gated:reference": "the reference stays: something has to compute",
    }
    assert [one.excluded for one in asked] == [("gated:slow",)]
    assert list(prepared.message().excluded) == ["gated:slow"]


class Runner:
    """Holds slices against what an engine can take."""

    layout = CacheLayout(page_size=4, num_pages=6, window=6, num_window_pages=6, state_slots=4)
    vocab_size = 100
    max_model_len = 20

    def __init__(self) -> None:
        self.steps: list[int] = []

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, slices: Sequence[Slice]) -> Computed:
        written: list[int] = []
        for piece in slices:
            assert 0 <= piece.start < piece.end <= self.max_model_len
            for pages in (piece.pages, piece.window_pages):
                assert len(pages) * 4 >= piece.end
                assert all(page < 6 for page in pages)
            oldest = self.layout.window_start(piece.start)
            assert all(page >= 0 for page in (*piece.pages, *piece.window_pages[oldest:]))
            written += piece.pages[piece.start // 4 :]
            assert piece.pages[piece.start // 4 :] == piece.window_pages[piece.start // 4 :]
            assert piece.state is not None
            assert piece.state.slot < 4
        # No two write to the same place, or the outcome were an accident.
        assert len(written) == len(set(written))
        self.steps.append(sum(len(piece.token_ids) for piece in slices))
        return Computed(torch.zeros(len(slices), self.vocab_size), frozenset)


def test_an_engine_is_warmed_up_with_each_kind_of_step_that_it_has_room_for(monkeypatch) -> None:
    with tempfile.TemporaryFile() as file:
        prepared = _prepared(monkeypatch, _plan(), file.fileno())
        drawn: list[tuple[int, bool]] = []

        def draw_tokens(logits: torch.Tensor, draws: Draws) -> None:
            drawn.append((len(logits), draws.truncated))

        prepared.operations = replace(prepared.operations, draw_tokens=draw_tokens)
    runner, phases = Runner(), []
    prepared.warm_up(runner, lambda phase, done, total: phases.append((done, total)))
    wanted = [step.tokens for step in STEPS]
    # 16 tokens and two decodes may need a page more than there is.
    assert set(wanted) - set(runner.steps) <= {16}
    assert len(runner.steps) >= len(wanted) - 1
    assert phases[-1] == (len(STEPS) - 1, len(STEPS))
    # Whatever requests ask for, of as many as there can be.
    assert set(drawn) == {(rows, truncated) for rows in (1, 2, 3, 4) for truncated in (False, True)}


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
