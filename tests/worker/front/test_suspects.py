"""An engine that dies of a kernel: the next one finds out which, and the one after that starts without it."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moebius_common.settings import read_settings
from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.flight_recorder import Flight, FlightRecorder, read_flights
from moebius_worker.front.engine_process import EngineProcess
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.standby import Standby
from moebius_worker.front.state import WorkerState
from moebius_worker.front.supervise import Observation, judge
from moebius_worker.front.supervisor import PROBATION_SECONDS, Supervisor, _Life
from moebius_worker.metrics import RequestMetrics, WorkerCollector
from moebius_worker.settings import WorkerSettings
from tests.waiting import PATIENCE
from tests.worker.front.test_supervise import POLICY

DEATHS = {
    "SIGSEGV": -11,
    "SIGABRT": -6,
    # Somebody else's doing.
    "SIGKILL": -9,
    "SIGTERM": -15,
    "an exit": 1,
}


@pytest.mark.parametrize(
    ("death", "suspected"), [*zip(DEATHS, [True, True, False, False, False], strict=True)]
)
def test_some_deaths_may_be_a_kernels_doing(death: str, suspected: bool) -> None:
    end = judge(Observation(ready=True, silence=0, exit_code=DEATHS[death]), POLICY)
    assert end is not None
    assert end.kernel_suspected is suspected


@pytest.mark.parametrize(
    ("reason", "suspected"), [(pb.REASON_GPU_FAULT, True), (pb.REASON_ENGINE_DEAD, False)]
)
def test_of_what_engines_say_only_a_fault_of_the_gpu_is(reason: pb.Reason, suspected: bool) -> None:
    fatal = engine_pb2.EngineFatal(reason=reason, message="an illegal memory access")
    end = judge(Observation(ready=True, silence=0, exit_code=1, fatal=fatal), POLICY)
    assert end is not None
    assert end.kernel_suspected is suspected


class DyingEngine:
    """Notes `flights` ("operation:backend"), and dies."""

    pid = 1

    def __init__(self, flights: tuple[str, ...], exit_code: int) -> None:
        self.exit_code = exit_code
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the engine)
        recorder = FlightRecorder(self._file.fileno())
        for flight in flights:
            recorder.prepare(*flight.split(":"), "x")(1)

    async def frames(self) -> AsyncIterator[engine_pb2.EngineFrame]:
        for _ in ():
            yield engine_pb2.EngineFrame()

    async def wait(self) -> int:
        return self.exit_code

    def kill(self) -> None:
        pass

    def last_flights(self) -> list[Flight]:
        return read_flights(self._file.fileno())


class Started(NamedTuple):
    excluded: tuple[str, ...]
    probation: float


async def _starts(engines: list[DyingEngine], **settings: object) -> list[Started]:
    """What each engine was started with."""
    started: list[Started] = []

    async def start(settings: WorkerSettings) -> DyingEngine:
        started.append(Started(settings.exclude_backends, settings.probation))
        if len(started) > len(engines):
            raise asyncio.CancelledError
        return engines[len(started) - 1]

    state = WorkerState(pid=1)
    exchange = Exchange(state, RequestMetrics(CollectorRegistry()))

    async def changed() -> None:
        pass

    options = WorkerSettings(model="m", restart_delay=0.001, max_restart_delay=0.001, **settings)
    supervisor = Supervisor(options, state, exchange, changed, Standby("no", start))
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE):
            await supervisor.run()
    return started


SEVERAL = ("linear:triton", "routed_experts:triton")


async def test_an_engine_on_probation_tells_which_backend_it_died_of() -> None:
    """That one is excluded, and stays so; whoever was noted last before is not to blame."""
    engines = [
        DyingEngine((*SEVERAL, "draw_tokens:triton"), -11),
        DyingEngine(SEVERAL, -11),
        DyingEngine(("linear:triton",), -9),
        DyingEngine(("linear:triton",), -11),
        DyingEngine(("linear:triton",), -11),
    ]
    first, second = "routed_experts:triton", "linear:triton"
    assert await _starts(engines) == [
        ((), 0),
        ((), PROBATION_SECONDS),
        ((first,), 0),
        ((first,), 0),
        ((first,), PROBATION_SECONDS),
        ((first, second), 0),
    ]


@pytest.mark.parametrize("last", ["rms_norm:reference", "none:reference"])
async def test_what_pytorch_computes_itself_is_not_excluded(last: str) -> None:
    engines = [DyingEngine(SEVERAL, -11), DyingEngine((*SEVERAL, last), -11)]
    assert await _starts(engines) == [((), 0), ((), PROBATION_SECONDS), ((), 0)]


async def test_who_notes_nothing_has_nothing_to_be_found() -> None:
    assert await _starts([DyingEngine((), -11)] * 2) == [((), 0)] * 3


async def test_what_the_user_excluded_stays_excluded() -> None:
    engines = [DyingEngine(("linear:triton",), -11)] * 2
    assert await _starts(engines, exclude_backends=("gated:fast",), probation=300) == [
        (("gated:fast",), 300),
        *[(("gated:fast", "linear:triton"), 300)] * 2,
    ]


@pytest.mark.parametrize(("ready_for", "on_probation"), [(None, True), (30.0, True), (61.0, False)])
def test_a_probation_ends(ready_for: float | None, on_probation: bool) -> None:
    since = None if ready_for is None else time.monotonic() - ready_for
    engine = cast("EngineProcess", DyingEngine((), -11))
    assert _Life(engine, WorkerSettings(model="m", probation=60), since).on_probation is on_probation
    assert not _Life(engine, WorkerSettings(model="m"), since).on_probation


async def test_a_real_engine_gets_a_file_for_its_flights(tmp_path: Path) -> None:
    engine = await EngineProcess.start(WorkerSettings(model=str(tmp_path / "no model")))
    try:
        async with asyncio.timeout(60):
            last = [frame async for frame in engine.frames()][-1]
            assert last.fatal.permanent
            assert engine.last_flights() == []
    finally:
        engine.kill()
        await engine.wait()


@pytest.mark.parametrize(
    ("arguments", "excluded"),
    [
        ([], ()),
        (["--exclude-backends", "linear:triton"], ("linear:triton",)),
        (["--exclude-backends", "linear:triton,gated:x"], ("linear:triton", "gated:x")),
    ],
)
def test_the_setting_takes_names_with_commas(arguments: list[str], excluded: tuple[str, ...]) -> None:
    assert read_settings(WorkerSettings, ["--model", "m", *arguments]).exclude_backends == excluded


def test_the_plan_is_exported() -> None:
    state = WorkerState(pid=1)
    plan = pb.KernelPlan(
        backends={"linear:triton": 7},
        rejections=[pb.KernelRejection(backend="linear:b", gate="crash", count=2, reason="SIGSEGV")],
        excluded=["linear:c"],
    )
    state.engine_ready(pb.Model(plan=plan), {}, engine_pb2.EngineStats(late_compilations=3))
    registry = CollectorRegistry()
    registry.register(WorkerCollector(state, Exchange(state, RequestMetrics(CollectorRegistry()))))
    text = generate_latest(registry).decode()
    for line in (
        'moebius_worker_kernel_choices{backend="linear:triton"} 7.0',
        'moebius_worker_kernel_rejections{backend="linear:b",gate="crash"} 2.0',
        'moebius_worker_kernel_excluded{backend="linear:c"} 1.0',
        "moebius_worker_late_compilations_total 3.0",
    ):
        assert line in text.splitlines()
