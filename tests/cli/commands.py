"""The `moebius` command as a child process, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

MOEBIUS = Path(sys.executable).with_name("moebius")


def moebius(
    *arguments: str | Path, given: str = "", timeout: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; `given` is what is typed."""
    return subprocess.run(
        [MOEBIUS, *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=os.environ | env,
    )


def assert_one_line_says(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """An error a user can cause: status 1, one line on stderr, no traceback."""
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


def processes_that_name(path: Path) -> list[str]:
    """Command lines that hold `path`: those of a stack hold its state directory or its model."""
    return [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and str(path) in " ".join(process.info["cmdline"] or ())
    ]
