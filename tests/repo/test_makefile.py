"""`make help` tells all of the Makefile, and `make` says what to do where it cannot work."""

import os
import re
import stat
import subprocess
from pathlib import Path

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


def _fake_python(folder: Path, script: str) -> Path:
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    return fake
