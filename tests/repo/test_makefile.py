"""`make help` tells all of the Makefile, and `make` says what to do where it cannot work."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Of a `make` that runs these tests, the flags and the ARGS are not for this one.
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, env=clean | env
    )


def test_help_is_the_default_and_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^  make (\S+) +(\S.*)$", done.stdout, re.MULTILINE))
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    assert set(listed) == set(targets[1].split())


def test_pages_name_targets_that_exist() -> None:
    listed = set(re.findall(r"^  make (\S+)", make().stdout, re.MULTILINE))
    seen: set[str] = set()
    for page in (ROOT / ".ci" / "run", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        # In code alone: as a line of a block, or between backticks.
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= listed, page
        seen |= named
    assert {"up", "test", "proto"} <= seen


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    done = make("up", f"VENV={tmp_path / 'venv'}", "PYTHON=python-that-is-not-there")
    assert done.returncode != 0
    assert "install Python 3.11 or newer" in done.stdout + done.stderr


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = _fake_python(tmp_path, 'case "$*" in *version_info*) exit 1;; --version) echo Python 3.9.2;; esac')
    done = make("up", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.9.2 is too old" in done.stdout + done.stderr


def test_a_python_without_venv(tmp_path: Path) -> None:
    bare = _fake_python(tmp_path, 'case "$*" in *ensurepip*) exit 1;; esac')
    done = make("up", f"VENV={tmp_path / 'venv'}", f"PYTHON={bare}")
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stdout + done.stderr
    assert not (tmp_path / "venv").exists()


def gpu_test(folder: Path, answers: str, *arguments: str) -> tuple[list[str], int]:
    """`make gpu-test` with a pytest that answers `case` of its arguments: what it was asked to run, and the
    status."""
    fake = _fake_python(folder / "bin", f'echo "$*" >> {folder}/asked; case "$*" in {answers} esac')
    for mark in (".created", ".installed", ".installed-dev"):
        (folder / mark).touch()
    done = make("gpu-test", f"VENV={fake.parent.parent}", *arguments)
    asked = [line.removeprefix("-m pytest ") for line in (folder / "asked").read_text().splitlines()]
    return asked, done.returncode


@pytest.mark.parametrize(
    "failing", ["--numprocesses", "tests/gpu/test_memory", "tests/gpu/test_preflight", "nothing"]
)
def test_gpu_tests_that_want_the_gpu_for_themselves_come_last_and_each_failure_counts(
    failing: str, tmp_path: Path
) -> None:
    asked, status = gpu_test(tmp_path, f"'-m pytest {failing}'*) exit 1;;", "GPU_JOBS=7", "ARGS=-q")
    together, *alone = asked
    assert re.match(r"--numprocesses 7 .*tests/gpu tests/kernels/triton .*-q$", together)
    names = ["memory", "standby", "preflight"]
    assert alone == [f"tests/gpu/test_{name}_gpu.py -q" for name in names]
    assert re.findall(r"--ignore tests/gpu/test_(\w+)_gpu.py", together) == names
    assert (status == 0) == (failing == "nothing")


def test_some_gpu_tests_alone(tmp_path: Path) -> None:
    """Of what is asked for; that a part has no such test is no failure, that all have none is one."""
    chosen = "GPU_TESTS=tests/gpu/test_memory_gpu.py::test_it tests/gpu/test_fp8_gpu.py"
    asked, status = gpu_test(tmp_path, "*::test_it*) exit 5;;", chosen)
    assert [line.split()[-1] for line in asked] == chosen.partition("=")[2].split()[::-1]
    assert status == 0
    (tmp_path / "asked").unlink()
    asked, status = gpu_test(tmp_path, "*) exit 5;;", "GPU_TESTS=tests/gpu/test_preflight_gpu.py")
    assert asked == ["tests/gpu/test_preflight_gpu.py"]
    assert status != 0


def test_gpu_tests_of_any_other_folder_leave_none_out(tmp_path: Path) -> None:
    """What is not run alone then is run with the others."""
    asked, status = gpu_test(tmp_path, "*) exit 0;;", "GPU_TESTS=tests", "GPU_JOBS=2")
    assert asked == ["--numprocesses 2 --timeout 300 tests"]
    assert status == 0


def test_gpu_tests_that_are_interrupted_end(tmp_path: Path) -> None:
    asked, status = gpu_test(tmp_path, "*) kill -INT $PPID; exit 2;;")
    assert len(asked) == 1
    assert status != 0


def _fake_python(folder: Path, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    return fake
