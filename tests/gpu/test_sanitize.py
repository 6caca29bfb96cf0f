"""`make gpu-sanitize` as far as it goes without NVIDIA's tools."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from tests.gpu import handed_over, sanitize
from tests.kernels.triton import arrivals
from tests.kernels.triton.gluon_machine import Machine
from tests.without_interpreter import told

# What the tools print at their end.
CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
# Of racecheck's control, as it is for now.
REPORTED = f"""\
{handed_over.RIGHT}
========= RACECHECK SUMMARY: 5 hazards displayed (5 errors, 0 warnings)"""
LEFT_OUT = (
    "racecheck: 7 of 32 cases left out, it does not follow what groups of warps hand over: its control is"
)


def test_the_cases_are_there_one_test_each() -> None:
    line = sanitize.command(sanitize.CASES, "-p", "no:xdist", "--collect-only")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(sanitize.CASES)} tests collected" in done.stdout


def test_racecheck_leaves_out_kernels_that_divide_their_labour() -> None:
    assert sanitize.TOOLS["memcheck"].cases == [*sanitize.CASES]
    left_out = set(sanitize.CASES) - set(sanitize.TOOLS["racecheck"].cases)
    assert {case.partition("::")[0] for case in left_out} == {*sanitize.TOOLS["racecheck"].left_out}
    assert len(left_out) == 7


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Stands in for compute-sanitizer: a script of sh for the cases, and one for racecheck's control."""

    def install(script: str, control: str = f"echo '{REPORTED}'; exit 9") -> None:
        program = tmp_path / "compute-sanitizer"
        program.write_text(f'#!/bin/sh\ncase "$*" in *handed_over) {control};; esac\n{script}\n')
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "command", lambda cases, *flags: ["true"])
    return install


def passing(summaries: dict[str, str], status: int = 0) -> str:
    endings = "".join(f"{tool}) echo '{text}';;" for tool, text in summaries.items())
    return f'echo "== 3 passed in 1.00s =="; case "$2" in {endings} esac; exit {status}'


@pytest.mark.parametrize(
    ("summary", "status", "said"),
    [
        (None, 0, "0 errors, 3 passed in 1.00s, exit status 0"),
        ("========= ERROR SUMMARY: 2 errors", 9, "2 errors, 3 passed in 1.00s, exit status 9"),
        (
            "========= RACECHECK SUMMARY: 4 hazards displayed (3 errors, 1 warning)",
            9,
            "3 errors, 3 passed in 1.00s, exit status 9",
        ),
        # It ended early: that nothing was counted says nothing.
        ("========= Target application terminated", 0, "no summary, 3 passed"),
    ],
)
def test_a_line_for_each_tool_says_what_it_counted(
    tool, tmp_path: Path, capsys, summary: str | None, status: int, said: str
) -> None:
    tool(passing({name: summary or clean for name, clean in CLEAN.items()}, status))
    assert sanitize.main(["--logs", str(tmp_path)]) == (0 if summary is None else 1)
    memcheck, left_out, racecheck = [
        line for line in capsys.readouterr().out.splitlines() if "check: " in line
    ]
    assert memcheck.startswith("memcheck: " + said)
    assert left_out.startswith(f"{LEFT_OUT} reported (5 errors)")
    assert racecheck.startswith("racecheck: " + said)


@pytest.mark.parametrize(
    ("control", "said"),
    [
        # A newer tool may follow it: then it can judge the cases too.
        (f"echo '{handed_over.RIGHT}\n{CLEAN['racecheck']}'; exit 0", "put the cases back that are left out"),
        # Errors of a program that is wrong excuse nobody, nor does one that did not end.
        (f"echo 'wrong: []\n{REPORTED.splitlines()[1]}'; exit 9", "its control came to no good end"),
        (f"echo '{handed_over.RIGHT}'; exit 0", "its control came to no good end"),
    ],
)
def test_cases_are_left_out_only_while_the_control_is_reported(
    tool, tmp_path: Path, capsys, control: str, said: str
) -> None:
    tool(passing(CLEAN), control)
    assert sanitize.main(["memcheck", "--logs", str(tmp_path)]) == 0
    assert "left out" not in capsys.readouterr().out
    assert sanitize.main(["racecheck", "--logs", str(tmp_path)]) == 1
    assert f"racecheck: {said}" in capsys.readouterr().out.replace(
        "its control is not reported any more: ", ""
    )


def test_a_tool_that_does_not_end_is_stopped(tool, tmp_path: Path, capsys) -> None:
    tool("exec sleep 60")
    assert sanitize.main(["memcheck", "--logs", str(tmp_path), "--seconds", "0.3"]) == 1
    assert "memcheck: no summary, no test ended, stopped after 0 s" in capsys.readouterr().out


def test_tests_that_fail_without_a_tool_are_not_run_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sanitize, "command", lambda cases, *flags: ["false"])
    monkeypatch.setattr(sanitize, "sanitize", lambda *_: pytest.fail("it was run"))
    assert sanitize.main(["--logs", str(tmp_path)]) == 1


def test_the_control_hands_numbers_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine, which sees a stage that is read or given back too early."""
    monkeypatch.setattr(handed_over, "launch", Machine().launch)
    source = torch.randn(handed_over.STEPS, handed_over.NUMBERS)
    target = torch.zeros_like(source)
    handed_over.hand_over(source, target)
    assert torch.equal(source, target)


def test_the_control_is_in_order(tmp_path: Path) -> None:
    """By what the compiler makes of it, as of the kernels: so what is reported of it is no race."""
    [made] = told("tests.kernels.triton.compiled_hopper", "handed over", cache=tmp_path).values()
    order = arrivals.order(made["ptx"])
    assert arrivals.faults(order, 0) == []
    assert arrivals.states(order) == arrivals.IN_ORDER
    # As the factors of `fp8_gemm_hopper.py`, which racecheck reports.
    assert any(line.startswith("ld.shared.b32") for line in order)
    assert any(line.startswith("cp.async.ca.shared.global") for line in order)
