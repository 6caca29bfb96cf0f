"""A worker that dies again while `moebius up` still waits for the gateway does not end the stack."""

import os
import signal
import time
from pathlib import Path

import pytest

from moebius_cli.state_dir import StateDir
from moebius_cli.up import GATEWAY_PATIENCE
from tests.cli.running_up import running_up
from tests.waiting import wait_for


def gateway(state_dir: Path) -> int:
    """The id of its process: 0 before there is one."""
    record = StateDir(state_dir).running()
    return record.gateway_pid if record else 0


@pytest.mark.timed
@pytest.mark.timeout(180)
def test_a_worker_that_dies_before_the_gateway_is_ready(tiny_model: Path, tmp_path: Path) -> None:
    env = {"MOEBIUS_WORKER_RESTART_DELAY": str(GATEWAY_PATIENCE + 5), "MOEBIUS_WORKER_STANDBY": "no"}
    with running_up(tiny_model, tmp_path, "--workers", "1", "--question", "", **env) as up:
        gateway_pid = wait_for(lambda: gateway(tmp_path), "the gateway's process is known")
        os.kill(gateway_pid, signal.SIGSTOP)
        up.says("1 ready")
        (engine,) = up.engines()
        engine.kill()
        # Longer than it bears a gateway that is not ready although a worker is.
        time.sleep(GATEWAY_PATIENCE + 2)
        os.kill(gateway_pid, signal.SIGCONT)
        # It ends without saying so, if it has given up.
        up.says("ready at")
