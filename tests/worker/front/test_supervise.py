import pytest

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front.supervise import Observation, Policy, deaths_in_a_row, judge, restart_delay

POLICY = Policy(
    stall_timeout=20, load_stall_timeout=600, restart_delay=0.1, max_restart_delay=30, healthy_after=60
)


def test_a_live_engine_is_left_alone() -> None:
    assert judge(Observation(ready=True, silence=19.9), POLICY) is None
    assert judge(Observation(ready=False, silence=599), POLICY) is None


def test_silence_is_a_stall_sooner_once_the_engine_is_ready() -> None:
    end = judge(Observation(ready=True, silence=20.1), POLICY)
    assert end is not None
    assert (end.reason, end.permanent) == (pb.REASON_ENGINE_STALLED, False)
    loading = judge(Observation(ready=False, silence=600.1), POLICY)
    assert loading is not None
    assert "loading" in loading.message


@pytest.mark.parametrize(
    ("exit_code", "ready", "words"),
    [
        (-9, True, ["SIGKILL", "memory"]),
        (-11, True, ["SIGSEGV"]),
        (-60, True, ["signal 60"]),
        (3, False, ["status 3", "while loading"]),
        (0, True, ["status 0"]),
    ],
)
def test_exit_is_death_and_says_how(exit_code: int, ready: bool, words: list[str]) -> None:
    end = judge(Observation(ready=ready, silence=0, exit_code=exit_code), POLICY)
    assert end is not None
    assert (end.reason, end.permanent) == (pb.REASON_ENGINE_DEAD, False)
    assert all(word in end.message for word in words)


def test_the_last_word_explains_more_than_the_exit_status() -> None:
    fatal = engine_pb2.EngineFatal(reason=pb.REASON_GPU_FAULT, message="Xid 79", permanent=False)
    end = judge(Observation(ready=True, silence=0, exit_code=1, broken="closed", fatal=fatal), POLICY)
    assert end is not None
    assert (end.reason, end.message, end.permanent) == (pb.REASON_GPU_FAULT, "Xid 79", False)


def test_a_permanent_fatal_is_permanent() -> None:
    fatal = engine_pb2.EngineFatal(reason=pb.REASON_ENGINE_DEAD, message="no config.json", permanent=True)
    end = judge(Observation(ready=False, silence=0, fatal=fatal), POLICY)
    assert end is not None
    assert end.permanent


def test_a_broken_connection_is_death() -> None:
    end = judge(Observation(ready=True, silence=0, broken="cannot be decoded"), POLICY)
    assert end is not None
    assert (end.reason, end.message) == (pb.REASON_ENGINE_DEAD, "cannot be decoded")


def test_delays_double_up_to_the_limit() -> None:
    delays = [restart_delay(deaths, POLICY, draw=0.5) for deaths in (1, 2, 3, 4, 9, 10, 5000)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 25.6, 30, 30])


def test_jitter_spreads_by_a_quarter() -> None:
    assert restart_delay(1, POLICY, draw=0.0) == pytest.approx(0.075)
    assert restart_delay(1, POLICY, draw=0.999) == pytest.approx(0.125, rel=0.01)


def test_deaths_are_forgotten_after_a_healthy_while() -> None:
    assert deaths_in_a_row(0, None, POLICY) == 1
    assert deaths_in_a_row(4, None, POLICY) == 5
    assert deaths_in_a_row(4, 59, POLICY) == 5
    assert deaths_in_a_row(4, 60, POLICY) == 1
