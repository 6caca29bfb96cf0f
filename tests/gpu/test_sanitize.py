"""`make gpu-sanitize` as far as it goes without NVIDIA's tools."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu import sanitize

pytest.importorskip("triton")

# What the tools print at their end.
CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def test_the_cases_are_there_one_test_each() -> None:
    done = subprocess.run(
        sanitize.command("-p", "no:xdist", "--collect-only"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(sanitize.CASES)} tests collected" in done.stdout


def _tool(folder: Path, script: str) -> None:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, summary: str | None, status: int, said: str
) -> None:
    endings = "".join(f"{tool}) echo '{summary or CLEAN[tool]}';;" for tool in CLEAN)
    _tool(tmp_path, f'echo "== 3 passed in 1.00s =="; case "$2" in {endings} esac; exit {status}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "command", lambda *flags: ["true"])
    assert sanitize.main(["--logs", str(tmp_path)]) == (0 if summary is None else 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "check: " in line]
    assert [line.partition(":")[0] for line in lines] == ["memcheck", "racecheck"]
    assert all(said in line for line in lines), lines


def test_a_tool_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    _tool(tmp_path, "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "command", lambda *flags: ["true"])
    assert sanitize.main(["memcheck", "--logs", str(tmp_path), "--seconds", "0.3"]) == 1
    assert "memcheck: no summary, no test ended, stopped after 0 s" in capsys.readouterr().out


def test_tests_that_fail_without_a_tool_are_not_run_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sanitize, "command", lambda *flags: ["false"])
    monkeypatch.setattr(sanitize, "sanitize", lambda *_: pytest.fail("it was run"))
    assert sanitize.main(["--logs", str(tmp_path)]) == 1
