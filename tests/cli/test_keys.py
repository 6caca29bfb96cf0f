"""`moebius keys`, and that the gateway's side reads what it writes."""

import stat
from pathlib import Path

from typer.testing import CliRunner

from moebius_cli.main import app
from moebius_gateway.admission.limits import ClientLimits, Priority
from moebius_gateway.auth.keys import hashed, parse_keys

RUN = CliRunner()


def keys(*arguments: str) -> str:
    done = RUN.invoke(app, ["keys", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_added_listed_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    limits = ("--priority", "high", "--max-concurrent", "8", "--tokens-per-minute", "1000")
    first = keys("add", "team-a", "--file", str(file), *limits)
    second = keys("add", "team-b", "--file", str(file))
    [a, b] = parse_keys(file.read_text())
    assert (a.hash, b.hash) == (hashed(first), hashed(second))
    assert a.client.limits == ClientLimits(Priority.HIGH, 8, None, 1000)
    assert first not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = keys("list", "--file", str(file))
    assert "team-a" in listed
    assert first not in listed
    keys("remove", "team-a", "--file", str(file))
    assert [key.client.name for key in parse_keys(file.read_text())] == ["team-b"]
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_what_cannot_be_is_said_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys("add", "a", "--file", str(file))
    before = file.read_text()
    for arguments in (
        ("add", "a", "--file", str(file)),
        ("add", "a b", "--file", str(file)),
        ("remove", "c", "--file", str(file)),
        ("add", "x", "--file", str(tmp_path / "none" / "keys")),
    ):
        assert RUN.invoke(app, ["keys", *arguments]).exit_code == 1
    assert file.read_text() == before
    file.write_text("nonsense\n")
    assert RUN.invoke(app, ["keys", "add", "b", "--file", str(file)]).exit_code == 1
    assert file.read_text() == "nonsense\n"
