"""Each gate holds one bad candidate back, with a reason that says why; what is right passes all."""

import math
import time

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.dispatch import bind
from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Plan, Verdict, token_ranges
from moebius_worker.preflight.draw import draw_plan
from moebius_worker.preflight.machine import Host
from moebius_worker.preflight.probe import Probe
from moebius_worker.preflight.report import Begun, Judged, Message, RanOut, Site, decode, encode
from moebius_worker.preflight.subject import ProbeStep, counts_of, steps_for
from tests.worker.preflight import bad

RANGES = token_ranges(8)
STEPS = steps_for(RANGES, max_running=8, max_step_tokens=8)


def _examine(
    *names: str, capture_tokens: int = 8, messages: list[Message] | None = None, **options
) -> tuple[Plan, list[Message]]:
    """The preflight in this process: none of these candidates takes it down."""
    subject = bad.Tiny()
    messages = [] if messages is None else messages
    probe = Probe(
        bad.registry(*names),
        RANGES,
        subject.device,
        subject.machine,
        messages.append,
        capture_tokens=capture_tokens,
        **options,
    )
    subject.bind(probe.operations())
    for step in STEPS:
        probe.kind = step.kind
        subject.run(step)
    verdicts = {(one.site, one.verdict.backend): one.verdict for one in messages if isinstance(one, Judged)}
    return draw_plan(verdicts, RANGES, capture_tokens=capture_tokens, identity={}), messages


def _verdicts(plan: Plan, backend: str) -> dict[str, Verdict]:
    """By range."""
    return {
        str(choice.tokens): verdict
        for choice in plan.choices
        for verdict in choice.verdicts
        if choice.operation == "gated" and verdict.backend == backend
    }


@pytest.mark.parametrize(
    ("name", "gate", "reason", "passes"),
    [
        ("wrong_architecture", "admission", "runs on cuda, not on cpu", []),
        ("small_tiles", "admission", "no tile for more than 4", ["1", "2", "3-4"]),
        ("raises_at_two", "compile", "ValueError: no valid tile for M = 2", ["1"]),
        ("wrong_numbers", "numbers", "relative error 5.0e-02, allowed 1e-03", []),
        ("wrong_row", "numbers", "relative error", ["1", "2", "3-4"]),
        ("not_as_declared", "numbers", "relative error 4.8e-02, allowed 3e-02", []),
        ("makes_nan", "numbers", "1 of ", []),
        ("forgets_a_row", "numbers", "16 of ", []),
        ("changes_its_input", "numbers", "it changed gate_up", []),
        ("refuses_capture", "capture", "not permitted when stream is capturing", []),
        ("ReadsAtCapture", "capture", "its replay differs from a plain call", []),
        ("runs_out", "memory", "OutOfMemoryError: CUDA out of memory.", []),
        ("runs_out_in_captures", "memory", "RuntimeError: operation failed", []),
        ("without_room", "memory", "OutOfMemoryError: CUDA out of memory.", []),
        ("leaves_an_error", "latched", "it left an error behind: invalid argument", []),
    ],
)
def test_a_gate_holds_back_what_it_is_for(name: str, gate: str, reason: str, passes: list[str]) -> None:
    plan, _ = _examine(name, "slow")
    verdicts = _verdicts(plan, name)
    assert [tokens for tokens, verdict in verdicts.items() if verdict.rejected is None] == passes
    for verdict in verdicts.values():
        if verdict.rejected:
            assert verdict.rejected == gate
            assert reason in (verdict.reason or "")
    # Its neighbours are judged all the same, and something computes.
    assert all(verdict.rejected is None for verdict in _verdicts(plan, "slow").values())
    assert all(choice.backend != name or str(choice.tokens) in passes for choice in plan.choices)


def test_what_stored_forms_declare_is_the_reference_of_backends_that_compute_it() -> None:
    plan, _ = _examine("as_declared")
    verdicts = _verdicts(plan, "as_declared")
    assert {name: verdict.rejected for name, verdict in verdicts.items()} == dict.fromkeys(map(str, RANGES))


def test_what_is_right_passes_and_the_fastest_is_chosen() -> None:
    plan, _ = _examine("good", "slow")
    verdicts = _verdicts(plan, "good")
    assert list(verdicts) == [str(one) for one in RANGES]
    for verdict in verdicts.values():
        assert verdict.rejected is None
        assert verdict.error is not None
        assert verdict.error < 1e-5
        assert verdict.captured
    assert {choice.operation for choice in plan.choices} == {"linear", "gated", "rms_norm"}
    assert all(choice.backend != "slow" for choice in plan.choices)
    assert plan.capturable(8)
    assert not plan.rejections
    # The plan works.
    subject = bad.Tiny()
    subject.bind(bind(plan, bad.registry("good", "slow")))
    subject.run(ProbeStep("prefill", 5))


def test_only_what_will_be_captured_has_to_be() -> None:
    plan, _ = _examine("refuses_capture", capture_tokens=2)
    verdicts = _verdicts(plan, "refuses_capture")
    rejected = {tokens: verdict.rejected for tokens, verdict in verdicts.items()}
    assert rejected == {"1": "capture", "2": "capture", "3-4": None, "5-8": None}
    assert not any(verdict.captured for verdict in verdicts.values())


def test_every_gate_is_announced_with_its_patience_and_every_announcement_is_answered() -> None:
    _, messages = _examine("good", "wrong_numbers")
    trying: list[str] = []
    for message in messages:
        match message:
            case Begun(backend=backend, gate=gate, seconds=seconds):
                assert not trying or trying[-1] == backend
                trying.append(backend)
                assert seconds == (60.0 if gate in ("compile", "again") else 20.0)
            case Judged(verdict=verdict):
                # What there is to try of a reference is only its capture, and its speed beside others.
                assert set(trying) <= {verdict.backend}
                assert trying or verdict.backend == "reference"
                trying.clear()
    assert not trying


def test_what_says_that_it_builds_long_is_given_the_time_for_its_first_call_alone() -> None:
    _, messages = _examine("builds_long")
    begun = [message for message in messages if isinstance(message, Begun)]
    assert {one.gate: one.seconds for one in begun if one.backend == "builds_long"} == {
        "compile": 300.0,
        "numbers": 20.0,
        "capture": 20.0,
        "time": 20.0,
        "again": 60.0,
    }


def test_what_is_known_is_not_tried_again_and_a_crash_speaks_for_larger_counts() -> None:
    _, messages = _examine("slow")
    known = {(one.site, one.verdict.backend): one.verdict for one in messages if isinstance(one, Judged)}
    _, again = _examine("slow", known=known)
    assert {one.gate for one in again if isinstance(one, Begun)} == {"again"}
    assert all(one.verdict == known[one.site, "slow"] for one in again if isinstance(one, Judged))
    at_two = next(site for site, backend in known if backend == "slow" and site.tokens == 2)
    crash = {(at_two, "slow"): Verdict("slow", "crash", "the process was killed by SIGSEGV")}
    _, again = _examine("slow", known={**known, **crash})
    assert all(one.site.tokens != 2 for one in again)
    _, again = _examine("slow", known=crash)
    later = {
        one.site.tokens: one.verdict
        for one in again
        if isinstance(one, Judged) and one.verdict.backend == "slow" and one.site.tokens > 2
    }
    assert list(later) == [3, 4, 5, 8]
    for verdict in later.values():
        assert verdict.rejected == "crash"
        assert verdict.reason == "at 2 tokens, the process was killed by SIGSEGV"


def test_what_passed_computes_later_calls_and_nothing_is_judged_twice() -> None:
    """Of three steps with as many tokens only the first needs a reference."""
    _, messages = _examine("as_declared", "slow")
    begun = [(one.site, one.backend, one.gate) for one in messages if isinstance(one, Begun)]
    judging = [one for one in begun if one[2] != "again"]
    assert len(set(judging)) == len(judging)
    later = [(site.tokens, backend) for site, backend, gate in begun if gate == "again"]
    steps = [step.tokens for step in STEPS]
    assert [tokens for tokens, _ in later] == [
        tokens for at, tokens in enumerate(steps) if tokens in steps[:at]
    ]
    # The fastest where that is known, else any.
    assert {backend for tokens, backend in later if tokens in (2, 4, 8)} == {"as_declared"}

    ones = torch.ones(3, 4)
    probe = Probe(bad.registry("as_declared"), RANGES, bad.Tiny.device, bad.MACHINE, messages.append)
    first, second = (probe.operations().gated(ones, SILU) for _ in range(2))
    assert torch.equal(first, REFERENCE.gated(ones, SILU))
    torch.testing.assert_close(second, 1.05 * first)


def test_what_fails_in_a_later_call_has_not_passed() -> None:
    plan, messages = _examine("raises_in_prefills", "slow")
    verdicts = _verdicts(plan, "raises_in_prefills")
    assert verdicts["1"].rejected is None
    assert verdicts["2"].rejected == "again"
    assert "no such stride (again, any step, 2 tokens)" in (verdicts["2"].reason or "")
    assert all(choice.backend != "raises_in_prefills" for choice in plan.choices if choice.tokens.first > 1)
    # One that was faster is not missed: with the reference the model goes on.
    assert {one.site.operation for one in messages if isinstance(one, Judged)} == {
        "linear",
        "gated",
        "rms_norm",
    }


def test_a_reference_that_has_no_memory_for_its_graph_is_not_told_from_one_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture(function: object) -> None:
        raise torch.OutOfMemoryError(bad.RAN_OUT)

    monkeypatch.setattr(bad.MACHINE, "capture", capture)
    plan, _ = _examine()
    assert {gate for _, gate in plan.rejections} == {"memory"}


@pytest.mark.parametrize(("name", "gate"), [("raises_at_two", "crash"), ("runs_out", "memory")])
def test_a_process_whose_device_is_lost_is_given_up(name: str, gate: str) -> None:
    messages: list[Message] = []

    class LostError(Exception):
        pass

    def give_up():
        raise LostError

    bad.MACHINE.healthy = lambda: False
    try:
        with pytest.raises(LostError):
            _examine(name, messages=messages, give_up=give_up)
    finally:
        del bad.MACHINE.healthy
    last = messages[-1]
    assert isinstance(last, Judged)
    assert last.verdict.rejected == gate


def test_counts_and_steps_cover_what_the_model_will_meet() -> None:
    assert [counts_of(one) for one in token_ranges(40)] == [
        (1,),
        (2,),
        (3, 4),
        (5, 8),
        (9, 16),
        (17, 32),
        (33, 40),
    ]
    steps = steps_for(token_ranges(16), max_running=4, max_step_tokens=16)
    assert [one.tokens for one in steps if one.kind == "decode"] == [1, 2, 3, 4]
    assert [one.tokens for one in steps if one.kind == "prefill"] == [2, 3, 4, 5, 8, 9, 16]


@pytest.mark.parametrize(
    "message",
    [
        Begun(Site("linear", "a key", 3, "decode"), "fast", "numbers", 2.0),
        Judged(Site("linear", "a key", 3), Verdict("fast", "numbers", "wrong", 0.5)),
        RanOut(bad.RAN_OUT),
    ],
)
def test_reports_survive_the_pipe(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("line", [b"", b"[]", b'["Begun", {}]', b'["Nothing", {}]', b"3"])
def test_what_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


@pytest.mark.parametrize(("enough", "calls"), [(math.inf, 4), (1e9, 4), (100.0, 1)])
def test_what_has_lost_in_its_first_call_is_not_called_again(enough: float, calls: int) -> None:
    made: list[None] = []

    def slow() -> None:
        made.append(None)
        time.sleep(0.01)

    assert Host().microseconds(slow, enough) >= 10_000
    assert len(made) == calls


@pytest.mark.timed
def test_what_has_lost_in_its_first_replay_is_not_captured_again() -> None:
    """Next to `good` nobody needs to know how slow this is to a microsecond."""
    captured: list[None] = []
    capture = bad.MACHINE.capture
    bad.MACHINE.capture = lambda function: (captured.append(None), capture(function))[1]
    try:
        _examine("slow")
        before = len(captured)
        _, messages = _examine("good", "slow")
    finally:
        del bad.MACHINE.capture
    counts, timed = 6, len(RANGES)
    # Candidate and reference, once to be replayed with other contents, once more to be timed; and two other
    # operations' references, which have no rivals.
    assert before == 2 * (counts + timed) + 2 * counts
    slow = [
        one.verdict.microseconds
        for one in messages
        if isinstance(one, Judged) and one.verdict.backend == "slow" and one.verdict.microseconds
    ]
    assert len(slow) == timed
    assert all(microseconds > 2000 for microseconds in slow)
    assert len(captured) - before <= before + counts
