import os
import signal
import subprocess
import sys

import pytest

from moebius_worker.engine.faults import FaultInjector, InjectedError
from moebius_worker.engine.types import Slice
from moebius_worker.settings import InjectedFault
from tests.waiting import PATIENCE

CHILD = """
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.types import Slice
from moebius_worker.settings import InjectedFault
injector = FaultInjector([InjectedFault(token_id=7, action="{action}")])
print("ready", flush=True)
injector.check([Slice(1, (1, 2, 7), 0, (0,), True)])
print("survived", flush=True)
"""


def piece(*token_ids: int) -> Slice:
    return Slice(handle=1, token_ids=token_ids, start=0, pages=(0,), sample=True)


def child(action: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD.format(action=action)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_raise_is_raised_only_for_its_token() -> None:
    injector = FaultInjector([InjectedFault(token_id=7, action="raise")])
    injector.check([piece(1, 2), piece(6, 8)])
    with pytest.raises(InjectedError, match="token 7"):
        injector.check([piece(1, 2), piece(6, 7)])


def test_without_faults_nothing_happens() -> None:
    FaultInjector(()).check([piece(7)])


def test_kill_is_sigkill() -> None:
    with child("kill") as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL


def test_hang_hangs_until_it_is_killed() -> None:
    with child("hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""
