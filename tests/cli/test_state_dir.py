"""One stack for a state directory, and a record that is believed only while its process lives."""

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moebius_cli.errors import CliError
from moebius_cli.state_dir import StateDir, UpRecord

OURS = UpRecord(
    os.getpid(), psutil.Process().create_time(), "http://127.0.0.1:1", "tiny", gateway_pid=2, controller_pid=3
)


def test_two_cannot_hold_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "deep" / "state")
    with state.locked():
        with pytest.raises(CliError, match="still starting"), StateDir(state.path).locked():
            pass
        state.write_record(OURS)
        with pytest.raises(CliError, match=r"http://127\.0\.0\.1:1"), StateDir(state.path).locked():
            pass
    with state.locked():
        pass


def test_a_record_is_found_while_its_process_lives(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert state.running() is None
    state.write_record(OURS)
    assert state.running() == OURS


def test_a_later_process_with_the_same_id_is_not_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.write_record(replace(OURS, process_started=OURS.process_started - 3600))
    assert state.running() is None


def test_what_an_earlier_stack_left_is_removed(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.locked():
        state.write_record(OURS)
        state.log("worker-7").write_text("old")
        # Not ours: it must stay.
        (tmp_path / "logs" / "other").mkdir()
        (tmp_path / "logs" / "mine.txt").write_text("precious")
        state.controller_file.write_text("old")
        state.clean()
        assert state.running() is None
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["lock", "logs", "mine.txt", "other"]
