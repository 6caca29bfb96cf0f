"""`moebius up` when its terminal is closed."""

import signal
from pathlib import Path

import pytest

from tests.cli.running_up import assert_gone, running_up
from tests.waiting import wait_for


@pytest.mark.timed
def test_a_closed_terminal_ends_it_in_order(tiny_model: Path, tmp_path: Path) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, and so would it")
    with running_up(tiny_model, tmp_path / "state", "--workers", "1") as up:
        wait_for(lambda: len(up.engines()) == 1, "an engine is started")
        family = up.family()
        up.process.send_signal(signal.SIGHUP)
        assert up.ended() == 0
        assert_gone(family)
        assert "stopping" in (tmp_path / "state" / "logs" / "controller.log").read_text()
