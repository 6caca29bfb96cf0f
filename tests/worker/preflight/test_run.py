"""Sacrificial processes: what takes one down costs a candidate and nothing else."""

import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from moebius_kernels.plan import Plan, Verdict, token_ranges
from moebius_worker.preflight import process, run
from moebius_worker.preflight.child import Task, decode_task, encode_task
from moebius_worker.preflight.probe import Patience
from moebius_worker.preflight.report import Judged, Site
from moebius_worker.preflight.run import Examination, PreflightError, PreflightMemoryError, preflight
from moebius_worker.preflight.subject import ProbeStep, steps_for
from tests.worker.preflight.bad import RAN_OUT

BAD = "tests.worker.preflight.bad"
RANGES = token_ranges(4)
STEPS = steps_for(RANGES, max_running=4, max_step_tokens=4)


def _examination(registry: str, **changes) -> Examination:
    return Examination(
        **{
            "subject": f"{BAD}:Tiny",
            "options": {"size": 16},
            "registry": f"{BAD}:{registry}",
            "ranges": RANGES,
            "steps": STEPS,
            "capture_tokens": 4,
            "patience": Patience(compile=10.0, run=10.0),
            **changes,
        }
    )


def _outcome(plan: Plan, backend: str) -> dict[str, tuple[str | None, str]]:
    return {
        str(choice.tokens): (verdict.rejected, verdict.reason or "")
        for choice in plan.choices
        for verdict in choice.verdicts
        if verdict.backend == backend
    }


@pytest.mark.timed
def test_what_takes_the_process_down_costs_a_candidate_and_nothing_else() -> None:
    seen: list[str] = []
    examination = _examination("everything", patience=Patience(compile=3.0, run=10.0))
    plan = preflight(examination, {"gpu": "none"}, lambda *progress: seen.append(progress[0]))
    # An illegal access from 4 tokens on; what was shown before it counts.
    crashed = _outcome(plan, "illegal_access")
    assert crashed["1"][0] is crashed["2"][0] is None
    assert crashed["3-4"][0] == "crash"
    assert "was killed by SIGSEGV at the gate compile" in crashed["3-4"][1]
    # Hanging, or compiling longer than anybody waits.
    assert all(
        rejected == "crash" and "took more than 3 s at the gate compile" in reason
        for rejected, reason in _outcome(plan, "hangs").values()
    )
    assert all(
        rejected == "crash" and "exited with status 0" in reason
        for rejected, reason in _outcome(plan, "exits").values()
    )
    # All others were judged as if nothing had happened.
    assert {rejected for rejected, _ in _outcome(plan, "good").values()} == {None}
    assert {rejected for rejected, _ in _outcome(plan, "wrong_numbers").values()} == {"numbers"}
    assert {rejected for rejected, _ in _outcome(plan, "leaves_an_error").values()} == {"latched"}
    assert {choice.operation for choice in plan.choices} == {"linear", "gated", "rms_norm"}
    # Which of those that passed is the fastest is chance.
    for choice in plan.choices:
        passed = {verdict.backend for verdict in choice.verdicts if verdict.rejected is None}
        assert choice.backend in passed - {"slow"}
    assert plan.identity == {"gpu": "none"}
    assert any("gated:good" in phase for phase in seen)


def test_whoever_kills_for_memory_rejects_no_backend_for_good() -> None:
    """Nor anywhere but there: a plan with this gate is not kept."""
    outcome = _outcome(preflight(_examination("killed"), {}), "is_killed_at_two")
    assert {tokens: rejected for tokens, (rejected, _) in outcome.items()} == {
        "1": None,
        "2": "memory",
        "3-4": None,
    }
    assert "was killed by SIGKILL at the gate compile" in outcome["2"][1]


def test_a_process_that_is_done_and_does_not_end_is_not_taken_for_that(monkeypatch) -> None:
    """It is killed by us then."""
    monkeypatch.setattr(run, "EXIT_SECONDS", 0.2)
    outcome = _outcome(preflight(_examination("never_ends"), {}), "closes_and_stays")
    assert {rejected for rejected, _ in outcome.values()} == {"crash"}


def test_what_takes_the_process_down_in_a_later_call_is_known_by_its_name() -> None:
    plan = preflight(_examination("good_until_later"), {})
    outcome = _outcome(plan, "exits_in_prefills")
    assert {tokens: rejected for tokens, (rejected, _) in outcome.items() if rejected} == {
        "2": "crash",
        "3-4": "crash",
    }
    assert "exited with status 0 at the gate again" in outcome["2"][1]
    assert all(one.backend == "reference" for one in plan.choices if one.tokens.first > 1)


def test_excluded_backends_are_not_tried() -> None:
    plan = preflight(_examination("everything", excluded=_dangerous()), {})
    assert not _outcome(plan, "hangs")
    assert {rejected for rejected, _ in _outcome(plan, "good").values()} == {None}


def _dangerous() -> tuple[str, ...]:
    return ("gated:hangs", "gated:exits", "gated:illegal_access")


def test_a_model_that_cannot_be_computed_is_told_from_bad_candidates() -> None:
    with pytest.raises(PreflightError, match=r"decode step of 1 tokens.*exited with status 3"):
        preflight(_examination("only_good", subject=f"{BAD}:Fails"), {})


def test_a_model_without_room_is_refused_with_what_to_lower_and_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = r"memory ran out.*--max-step-tokens, --max-running\. The device said: CUDA out of memory\. Tried"
    with pytest.raises(PreflightMemoryError, match=words) as refusal:
        preflight(_examination("only_good", subject=f"{BAD}:RunsOut"), {})
    assert refusal.value.said == RAN_OUT
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.timed
def test_a_process_that_says_nothing_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(run, "SILENCE_SECONDS", 0.01)
    started = time.monotonic()
    with pytest.raises(PreflightError, match="said nothing for 0 s"):
        preflight(_examination("only_good"), {})
    assert time.monotonic() - started < 30


def test_nothing_is_tried_before_everything_is_compiled_and_something_else_is_done_meanwhile(
    tmp_path: Path,
) -> None:
    """Whatever goes wrong with compiling ahead: the preflight compiles what it tries."""
    seen: list[str] = []
    examination = _examination(
        "only_good",
        subject=f"{BAD}:Remembers",
        sizes=f"{BAD}:slow_sizes",
        options={"folder": str(tmp_path)},
    )
    plan = preflight(
        examination, {}, lambda *progress: seen.append(progress[0]), (tmp_path / "meanwhile").touch
    )
    assert {rejected for rejected, _ in _outcome(plan, "good").values()} == {None}
    assert (tmp_path / "run").read_text() == "meanwhile sizes"
    assert seen[0] == "preflight: looking for kernels to compile"


def test_what_is_done_meanwhile_may_fail() -> None:
    def fails() -> None:
        raise OSError("the weights cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        preflight(_examination("only_good", sizes=f"{BAD}:no_sizes"), {}, meanwhile=fails)


def test_it_is_compiled_once_however_many_processes_judge() -> None:
    done: list[str] = []
    examination = _examination("only_good", subject=f"{BAD}:Fails", sizes=f"{BAD}:no_sizes")
    with pytest.raises(PreflightError):
        preflight(examination, {}, meanwhile=lambda: done.append("meanwhile"))
    assert done == ["meanwhile"]


def test_a_compiling_process_that_dies_is_not_waited_for() -> None:
    plan = preflight(_examination("only_good", sizes=f"{BAD}:no_sizes"), {})
    assert {rejected for rejected, _ in _outcome(plan, "good").values()} == {None}


def test_what_was_not_compiled_before_is_logged_and_judged_all_the_same() -> None:
    with capture_logs() as logged:
        plan = preflight(_examination("only_good", sizes=f"{BAD}:SizesThatRaise"), {})
    [said] = [entry for entry in logged if "not all was compiled" in entry["event"]]
    assert said["result"] == (
        f"0 of 0 kernels compiled, {len(STEPS)} steps not followed to their ends: a decode step of 1 tokens "
        "raised ValueError: not on this device"
    )
    assert {rejected for rejected, _ in _outcome(plan, "good").values()} == {None}


def test_processes_that_were_started_before_are_taken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_GPU", tmp_path)
    monkeypatch.setattr(process, "_MODEL", BAD)
    monkeypatch.setenv("TRITON_CACHE_DIR", "not yet known")
    waiting = process.start_early("auto")
    assert set(waiting) == {"ahead", "child"}
    ids = {one.process.pid for one in waiting.values()}
    # As `find_plan` does, once it knows what compiles.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    examination = _examination(
        "only_good", subject=f"{BAD}:Placed", sizes=f"{BAD}:no_sizes", options={"folder": str(tmp_path)}
    )
    plan = preflight(examination, {}, waiting=waiting)
    assert (tmp_path / "place").read_text() == str(tmp_path / "triton")
    assert {rejected for rejected, _ in _outcome(plan, "good").values()} == {None}
    assert not waiting
    assert not [pid for pid in ids if Path(f"/proc/{pid}").exists()]


def test_processes_are_started_early_only_if_they_will_be_needed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(process, "_GPU", tmp_path / "nvidiactl")
    assert process.start_early("cuda") == {}
    (tmp_path / "nvidiactl").touch()
    assert process.start_early("cpu") == {}
    (tmp_path / "plans" / "0123").mkdir(parents=True)
    (tmp_path / "plans" / "0123" / "plan.json").touch()
    assert process.start_early("cuda") == {}


def test_a_process_that_nobody_takes_can_be_ended_twice() -> None:
    waiting = process.PreflightProcess.start("child")
    assert waiting.end() == waiting.end() == -9


def test_a_task_survives_the_pipe() -> None:
    known = Judged(Site("gated", "a key", 3, "decode"), Verdict("good", "numbers", "wrong", 0.5))
    task = Task(
        **vars(_examination("everything", excluded=("gated:good",))),
        first_step=3,
        known=(known,),
        environment={"A_NAME": "a value"},
    )
    assert decode_task(encode_task(task)) == task


def test_without_steps_there_is_nothing_to_do() -> None:
    assert preflight(_examination("only_good", steps=()), {}) == Plan()
    assert ProbeStep("decode", 1) in STEPS
