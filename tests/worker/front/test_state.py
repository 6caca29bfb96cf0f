"""What the front remembers of engines that are gone."""

from prometheus_client import CollectorRegistry

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.state import WorkerState
from moebius_worker.metrics import RequestMetrics, WorkerCollector


def restarts(state: WorkerState) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(WorkerCollector(state, Exchange(state, RequestMetrics(CollectorRegistry()))))
    names = ("ENGINE_DEAD", "ENGINE_STALLED", "GPU_FAULT", "LEVEL_CHANGED")
    found = {
        name: registry.get_sample_value("moebius_worker_engine_restarts_total", {"reason": name})
        for name in names
    }
    return {name: value for name, value in found.items() if value is not None}


def test_restarts_are_counted_by_why_the_engine_before_ended() -> None:
    state = WorkerState(pid=1)
    state.engine_started(10)
    assert set(restarts(state).values()) == {0}
    for pid, reason in enumerate((pb.REASON_ENGINE_DEAD, pb.REASON_GPU_FAULT, pb.REASON_ENGINE_DEAD), 11):
        state.engine_ended(reason, "it ended", permanent=False)
        state.engine_started(pid)
    state.engine_replaced()
    state.engine_started(20)
    counted = {"ENGINE_DEAD": 2, "ENGINE_STALLED": 0, "GPU_FAULT": 1, "LEVEL_CHANGED": 1}
    assert restarts(state) == counted
    assert sum(restarts(state).values()) == state.restarts


def test_a_first_engine_that_could_not_be_started_at_once_is_no_restart() -> None:
    state = WorkerState(pid=1)
    state.engine_ended(pb.REASON_ENGINE_DEAD, "no process can be started", permanent=False)
    state.engine_started(10)
    assert sum(restarts(state).values()) == state.restarts == 0


def test_what_the_engine_tells_of_its_experts_is_exported() -> None:
    state = WorkerState(pid=1, experts=engine_pb2.ExpertUse(imbalance=[1.5, 4.0], idle=3))
    registry = CollectorRegistry()
    registry.register(WorkerCollector(state, Exchange(state, RequestMetrics(CollectorRegistry()))))
    assert registry.get_sample_value("moebius_worker_expert_imbalance", {"layer": "1"}) == 4.0
    assert registry.get_sample_value("moebius_worker_experts_idle") == 3
