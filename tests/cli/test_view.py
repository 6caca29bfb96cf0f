"""What is seen of workers from outside."""

import os
from pathlib import Path

import pytest

from moebius_cli.view import WorkerView, view_workers
from moebius_controller.spec import StackSpec, WorkerSpec
from moebius_controller.state_file import ControllerState, ProcessView
from tests.gateway.worker_standin import Plan, StandIn, serving
from tests.waiting import PATIENCE

TAKEN = "it exited with status 1: cannot listen"


async def seen(port: int, process: ProcessView) -> WorkerView:
    spec = WorkerSpec("worker-0", ("moebius-worker",), f"127.0.0.1:{port}", Path("worker-0.log"))
    control = ControllerState(1, processes={"worker-0": process})
    (view,) = await view_workers(StackSpec((spec,)), control)
    return view


@pytest.mark.parametrize(
    ("process", "state", "last_fault"),
    [
        (ProcessView(1, os.getpid()), "READY", ""),
        (ProcessView(2, None, TAKEN), "UNREACHABLE", TAKEN),
        (ProcessView(2, os.getpid() + 1), "UNREACHABLE", ""),
    ],
)
async def test_a_stranger_at_its_address_is_not_the_worker(
    process: ProcessView, state: str, last_fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moebius_cli.view.PROBE_TIMEOUT", PATIENCE)
    async with serving(StandIn(Plan())) as port:
        view = await seen(port, process)
        assert (view.state, view.last_fault) == (state, last_fault)
