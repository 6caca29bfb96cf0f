"""How a command fails when the user can do something about it."""

import subprocess

from typer.testing import CliRunner

from moebius_cli.main import app


def refused(*arguments: object) -> str:
    """Runs a command in this process, which ends with status 1 and nothing but one line; returns that."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return _only_line(result.stderr)


def assert_one_line_says(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Status 1 and one line on stderr: no traceback, and nothing before it that hides it."""
    assert done.returncode == 1, done.stdout + done.stderr
    line = _only_line(done.stderr)
    for word in words:
        assert word in line


def _only_line(stderr: str) -> str:
    assert len(stderr.splitlines()) == 1, stderr
    assert stderr.startswith("Error: ")
    return stderr
