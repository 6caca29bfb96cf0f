"""The supervisor with an engine that is ready at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front import supervisor as supervisor_module
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.standby import Standby
from moebius_worker.front.state import WorkerState
from moebius_worker.front.supervisor import Supervisor
from moebius_worker.metrics import RequestMetrics
from moebius_worker.settings import WorkerSettings
from tests.waiting import PATIENCE


class ReadyEngine:
    pid = 1

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def frames(self) -> AsyncIterator[engine_pb2.EngineFrame]:
        yield engine_pb2.EngineFrame(ready=engine_pb2.EngineReady())
        await self.gone.wait()

    async def wait(self) -> int:
        await self.gone.wait()
        return -9

    def kill(self) -> None:
        self.gone.set()


async def test_a_model_that_the_front_cannot_read_is_a_permanent_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(settings: WorkerSettings) -> ReadyEngine:
        return ReadyEngine()

    def read_served_model(*_: object) -> None:
        raise ArithmeticError("what nobody thought of")

    monkeypatch.setattr(supervisor_module, "read_served_model", read_served_model)
    state = WorkerState(pid=1)
    exchange = Exchange(state, RequestMetrics(CollectorRegistry()))

    async def changed() -> None:
        pass

    async with asyncio.timeout(PATIENCE):
        await Supervisor(
            WorkerSettings(model="nowhere"), state, exchange, changed, Standby("no", start)
        ).run()
    assert state.state == pb.STATE_FAILED
    assert state.last_fault is not None
    assert "ArithmeticError: what nobody thought of" in state.last_fault.message
