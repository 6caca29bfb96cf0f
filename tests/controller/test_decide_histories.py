"""Random histories of several workers: what must hold whatever happens, and in the long run."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moebius_controller.policy import LADDER, Policy, Rung, restart_delay
from moebius_controller.state_file import ControllerState, load_state, save_state
from moebius_controller.types import GiveUp, History, Past, Replace, Start, State, Step, Trouble
from tests.controller.fleet import Condition, FakeWorker, Fleet

WORKERS = 3
LOOP = next(rung.times for rung in LADDER if (rung.when, rung.step) == (Trouble.DEATHS, Step.GIVE_UP))
FAILED_SECONDS = next(rung.seconds for rung in LADDER if rung.when is Trouble.FAILED and rung.seconds)
seconds = st.floats(0.01, 20)


def ladder(silent: float, mute: float, stuck: float, deaths: int) -> tuple[Rung, ...]:
    """The usual one with other numbers."""
    numbers = {
        (Trouble.SILENT, Step.REPLACE): {"seconds": silent},
        (Trouble.MUTE, Step.REPLACE): {"seconds": mute},
        (Trouble.STUCK, Step.REPLACE): {"seconds": stuck},
        (Trouble.DEATHS, Step.GIVE_UP): {"times": deaths},
    }
    return tuple(replace(rung, **numbers.get((rung.when, rung.step), {})) for rung in LADDER)


policies = st.builds(
    Policy,
    ladder=st.builds(ladder, seconds, seconds, seconds, st.integers(1, 5)),
    restart_delay=st.floats(0.01, 2),
    max_restart_delay=st.floats(0.01, 20),
    healthy_after=st.floats(1, 60),
    retry_delay=seconds,
)
# Time that passes until the next look, and what becomes of which worker before it.
steps = st.lists(
    st.tuples(st.floats(0.01, 15), st.integers(0, WORKERS - 1), st.sampled_from(Condition)),
    min_size=5,
    max_size=40,
)


@pytest.fixture(scope="module")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("controller") / "controller.json"


def longest_wait(policy: Policy) -> float:
    """Between the look that finds a worker dead and its start."""
    return 1.25 * max(policy.retry_delay, policy.max_restart_delay)


def waited_enough(fleet: Fleet, worker: FakeWorker) -> bool:
    past = fleet.history[worker.name]
    # Of one that is silent since a moment, its last word counts.
    said = worker.health is not None and worker.health.state is State.FAILED
    failed = worker.condition is Condition.FAILED or (worker.condition is Condition.SILENT and said)
    if not failed or not past.given_up_at or not past.failed_at:
        return False
    waited = fleet.now - past.given_up_at >= restart_delay(worker.name, past, fleet.policy)
    return waited and fleet.now - past.failed_at >= FAILED_SECONDS


@settings(max_examples=1000 if os.environ.get("MOEBIUS_LONG_TRACES") else 25, deadline=None)
@given(policy=policies, steps=steps)
def test_every_cause_has_one_action_and_every_death_a_restart(
    state_file: Path, policy: Policy, steps: list[tuple[float, int, Condition]]
) -> None:
    def restarted_controller(history: History) -> History:
        save_state(state_file, ControllerState(1, history))
        state = load_state(state_file)
        assert state is not None
        assert state.history == history
        return state.history

    fleet = Fleet(policy, [FakeWorker(f"w{i}") for i in range(WORKERS)], restarted_controller)
    found_dead: dict[str, float] = {}
    given_up: set[str] = set()
    fleet.look()
    assert len(fleet.times(Start)) == WORKERS
    for passed, number, condition in steps:
        fleet.now += passed
        fleet.workers[number].become(condition, fleet.now - passed / 2)
        sick = {worker.name for worker in fleet.workers if worker.sick(policy, fleet.now)}
        # Those that could not start their engine are tried again after a while.
        sick |= {worker.name for worker in fleet.workers if waited_enough(fleet, worker)}
        for worker in fleet.workers:
            if worker.condition is Condition.DEAD:
                found_dead.setdefault(worker.name, fleet.now)
        actions = fleet.look()
        for action in actions:
            if isinstance(action, GiveUp):
                assert action.worker not in given_up, "given up twice"
                given_up.add(action.worker)
            else:
                given_up.discard(action.worker)
        for worker in fleet.workers:
            lived = fleet.now - fleet.history[worker.name].started_at
            serves = worker.health is not None and worker.health.state is State.READY
            if serves and lived >= policy.healthy_after:
                given_up.discard(worker.name)
        assert {action.worker for action in actions if isinstance(action, Replace)} == sick
        for worker in fleet.workers:
            if worker.condition is not Condition.DEAD:
                found_dead.pop(worker.name, None)
        overdue = [name for name, since in found_dead.items() if fleet.now - since > longest_wait(policy)]
        assert not overdue, "a dead worker was not started in time"
    taken = [action for _, action in fleet.actions if not isinstance(action, GiveUp)]
    assert len({(type(action), action.worker, action.run) for action in taken}) == len(taken)


@settings(deadline=None)
@given(policy=policies, deaths=st.integers(1, 2000), died_at=st.floats(0, 4e9))
@example(policy=Policy(), deaths=4000, died_at=0.0)
def test_back_off_grows_and_is_bounded(policy: Policy, deaths: int, died_at: float) -> None:
    first, second = (
        restart_delay("w", Past(died_at=died_at, deaths=count), policy) for count in (deaths, deaths + 1)
    )
    assert 0 < first <= 1.25 * policy.max_restart_delay
    # The spread is the same for the same time of death.
    at_limit = second >= 0.75 * policy.max_restart_delay
    assert second == pytest.approx(2 * first) or (at_limit and first <= second < 2 * first)


def run(fleet: Fleet, duration: float, look_interval: float = 0.25) -> None:
    end = fleet.now + duration
    while fleet.now < end:
        fleet.now += look_interval
        fleet.look()


class DiesAtOnce(FakeWorker):
    def start(self, run: int, now: float) -> None:
        super().start(run, now)
        self.condition = Condition.DEAD


def test_a_crash_loop_stays_one() -> None:
    """With the default policy: a few quick tries, and then a start a minute, for as long as it takes."""
    fleet = Fleet(Policy(), [DiesAtOnce("w")])
    run(fleet, 3600)
    gaps = [after - before for before, after in itertools.pairwise(fleet.times(Start))]
    quick, slow = gaps[: LOOP - 1], gaps[LOOP - 1 :]
    assert all(after >= before for before, after in itertools.pairwise(quick))
    assert sum(quick) < 12
    assert len(slow) > 45
    assert all(44 < gap < 77 for gap in slow)
    # Each death of the loop is told of once, from the moment when it is one.
    assert len(fleet.times(GiveUp)) - len(slow) in (0, 1)


def test_a_worker_that_recovers_is_as_good_as_new() -> None:
    policy = Policy()
    fleet = Fleet(policy, [DiesAtOnce("w")])
    run(fleet, 600)
    assert fleet.history["w"].deaths > LOOP
    fleet.workers = [FakeWorker("w", fleet.workers[0].run)]
    run(fleet, 80)
    fleet.workers[0].become(Condition.IDLE, fleet.now)
    run(fleet, policy.healthy_after)
    fleet.workers[0].become(Condition.DEAD, fleet.now)
    before = fleet.now
    run(fleet, 1)
    assert fleet.times(Start)[-1] - before <= 1.25 * policy.restart_delay + 0.5


def test_nothing_is_ever_done_about_what_is_well() -> None:
    well = [
        Condition.IDLE,
        Condition.BUSY,
        Condition.LOADING,
        Condition.DRAINING,
        Condition.RESTARTING,
    ]
    fleet = Fleet(Policy(), [FakeWorker(condition) for condition in well])
    fleet.look()
    for worker, condition in zip(fleet.workers, well, strict=True):
        worker.become(condition, fleet.now)
    run(fleet, 3 * 3600, look_interval=2)
    assert len(fleet.actions) == len(well)
