from pathlib import Path

import pytest

from moebius_common.exit_reason import exit_reason, last_line


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL"),
        (-60, "was killed by signal 60"),
    ],
)
def test_how_a_process_ended(status: int, reason: str) -> None:
    assert exit_reason(status) == reason


def test_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"")
    assert last_line(log) == ""
    log.write_bytes(b"first\n" * 10_000 + b"  last \xff\n\n \n")
    assert last_line(log) == "last \N{REPLACEMENT CHARACTER}"
    assert "cannot be read" in last_line(tmp_path)
