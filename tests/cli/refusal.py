"""How a command fails when the user can do something about it."""

import subprocess


def assert_one_line_says(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Status 1 and one line on stderr: no traceback, and nothing before it that hides it."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("Error: ")
    for word in words:
        assert word in done.stderr
