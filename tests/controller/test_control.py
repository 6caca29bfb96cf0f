"""The control loop over a driver that a test plays: what it does, remembers, tells and survives."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from moebius_controller.control import Controller
from moebius_controller.events import KEPT_EVENTS, What
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.policy import LADDER, Policy
from moebius_controller.state_file import (
    ControllerState,
    FileMemory,
    ProcessView,
    StaleMemoryError,
    load_state,
    save_state,
)
from moebius_controller.types import (
    Action,
    Cause,
    GiveUp,
    Health,
    Observation,
    Past,
    Replace,
    Start,
    State,
    Step,
    Trouble,
)
from moebius_controller.view import View

POLICY = Policy(
    ladder=tuple(replace(rung, times=3) if rung.step is Step.GIVE_UP else rung for rung in LADDER),
    restart_delay=1,
    retry_delay=60,
)
FIRST = Cause(None, "it is to run")


@dataclass
class PlayedDriver:
    """Implements `Driver` for one worker; starts and kills show at the next look."""

    seen: Observation = field(default_factory=lambda: Observation("w"))
    performed: list[Action] = field(default_factory=list)
    looks: int = 0
    hands_off: str = ""
    term: int = 1

    def view(self) -> View:
        self.looks += 1
        return View([self.seen], hands_off=self.hands_off, term=self.term)

    def processes(self) -> Mapping[str, ProcessView]:
        return {"w": ProcessView(self.seen.run, None, self.seen.death)}

    async def perform(self, action: Action) -> bool:
        self.performed.append(action)
        match action:
            case Start():
                self.seen = Observation("w", action.run)
            case Replace():
                self.die("it was killed by SIGKILL")
        return True

    async def changed(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def be_ready(self) -> None:
        self.seen = Observation("w", self.seen.run, None, Health(State.READY))

    def die(self, how: str) -> None:
        self.seen = Observation("w", self.seen.run, how)


@dataclass
class Played:
    driver: PlayedDriver
    state_file: Path

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another controller takes over, with what the one before left on disk."""
        metrics = ControllerMetrics(CollectorRegistry())
        self.controller = Controller(self.driver, POLICY, FileMemory(self.state_file), metrics)

    def state(self) -> ControllerState:
        state = load_state(self.state_file)
        assert state is not None
        return state

    def told(self) -> list[tuple[What, int]]:
        return [(event.what, event.run) for event in self.state().events]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(PlayedDriver(), tmp_path / "controller.json")


async def test_a_life_is_told_with_its_reasons(played: Played) -> None:
    driver, look = played.driver, played.controller.look
    await look(100)
    driver.be_ready()
    await look(101)
    await look(102)
    driver.die("it was killed by SIGSEGV")
    await look(110)
    await look(110.5)
    await look(111.3)
    driver.seen = Observation("w", 2, None, Health(State.READY), silence=11)
    await look(130)
    await look(130.1)
    assert played.told() == [
        (What.STARTED, 1),
        (What.READY, 1),
        (What.DIED, 1),
        (What.STARTED, 2),
        (What.READY, 2),
        (What.KILLED, 2),
        (What.DIED, 2),
    ]
    events = played.state().events
    assert events[3].reason == "it was killed by SIGSEGV"
    assert events[5].reason == "it has not answered for 11 s"
    assert [event.time for event in events] == [100, 101, 110, 111.3, 130, 130, 130.1]


async def test_a_restarted_controller_goes_on_where_the_one_before_was(played: Played) -> None:
    """One death, seen by five controllers in turn: one event, one restart, and that after the delay."""
    await played.controller.look(100)
    played.driver.die("it was killed by SIGKILL")
    for now in (110, 110.2, 110.4, 110.6, 111.3):
        played.restart()
        await played.controller.look(now)
    assert played.told() == [(What.STARTED, 1), (What.DIED, 1), (What.STARTED, 2)]
    assert played.driver.performed == [
        Start("w", 1, FIRST),
        Start("w", 2, Cause(Trouble.DEAD, "it was killed by SIGKILL")),
    ]


async def test_a_crash_loop_is_given_up_with_the_reason(played: Played) -> None:
    now = 0.0
    while not any(isinstance(action, GiveUp) for action in played.driver.performed):
        await played.controller.look(now)
        if played.driver.seen.death is None:
            played.driver.die("it exited with status 3: out of luck")
        now += 0.5
        assert now < 60
    await played.controller.look(now + 30)
    starts = [action for action in played.driver.performed if isinstance(action, Start)]
    assert [start.run for start in starts] == [1, 2, 3]
    assert played.told()[-1] == (What.GAVE_UP, 3)
    assert "out of luck" in played.state().events[-1].reason


async def test_only_so_many_events_are_kept(played: Played) -> None:
    for look in range(KEPT_EVENTS):
        await played.controller.look(100.0 * look)
        played.driver.die("again")
    assert len(played.state().events) == KEPT_EVENTS
    assert played.told()[-1] == (What.GAVE_UP, played.driver.seen.run)


async def test_a_full_disk_is_no_reason_to_leave_workers_alone(played: Played) -> None:
    played.state_file.parent.joinpath("controller.json.new").mkdir()
    await played.controller.look(100)
    assert played.driver.performed == [Start("w", 1, FIRST)]
    played.state_file.parent.joinpath("controller.json.new").rmdir()
    await played.controller.look(101)
    assert played.told() == [(What.STARTED, 1)]


async def test_the_file_is_written_only_when_there_is_news(played: Played) -> None:
    await played.controller.look(100)
    await played.controller.look(100.5)
    written = played.state_file.stat().st_ino
    played.driver.seen = Observation("w", 1, silence=1.0)
    await played.controller.look(101)
    assert played.state_file.stat().st_ino == written


async def test_it_ends_when_it_is_told_to(played: Played) -> None:
    stop = asyncio.Event()

    class TellsAtTheThirdLook(PlayedDriver):
        async def changed(self, seconds: float) -> None:
            assert seconds == 0.5
            if self.looks == 3:
                stop.set()

    played.driver = TellsAtTheThirdLook()
    played.restart()
    await played.controller.run(0.5, stop)
    assert played.driver.looks == 3


async def test_metrics(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    driver = PlayedDriver()
    controller = Controller(driver, POLICY, FileMemory(tmp_path / "state.json"), ControllerMetrics(registry))

    def state(name: str) -> float | None:
        return registry.get_sample_value("moebius_controller_worker_state", {"worker": "w", "state": name})

    def events(name: str) -> float | None:
        return registry.get_sample_value("moebius_controller_events_total", {"worker": "w", "event": name})

    await controller.look(100)
    assert (state("DEAD"), state("SILENT"), events("started"), events("died")) == (1, 0, 1, 0)
    await controller.look(101)
    assert (state("DEAD"), state("SILENT"), state("READY")) == (0, 1, 0)
    driver.seen = Observation("w", 1, None, Health(State.READY), silence=0.5)
    await controller.look(102)
    assert (state("SILENT"), state("READY"), events("ready")) == (0, 1, 1)
    assert registry.get_sample_value("moebius_controller_worker_silence_seconds", {"worker": "w"}) == 0.5
    assert registry.get_sample_value("moebius_controller_last_look_timestamp_seconds") == 102


async def test_metrics_of_workers_that_are_forgotten_go(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    driver = PlayedDriver()
    controller = Controller(driver, POLICY, FileMemory(tmp_path / "state.json"), ControllerMetrics(registry))

    def series(worker: str) -> list[str]:
        return [
            one.name
            for family in registry.collect()
            for one in family.samples
            if one.labels.get("worker") == worker
        ]

    await controller.look(100)
    assert "moebius_controller_worker_silence_seconds" in series("w")
    driver.seen = Observation("v", 1)
    await controller.look(101)
    assert {name.removesuffix("_total").removesuffix("_created") for name in series("w")} == {
        "moebius_controller_events"
    }
    await controller.look(101 + POLICY.gone_memory)
    assert not series("w")
    assert series("v")


async def test_who_leads_no_more_does_not_say_what_was_given_up(tmp_path: Path) -> None:
    """It may serve by now: only who leads knows."""
    registry = CollectorRegistry()
    driver = PlayedDriver(Observation("w", 1, None, Health(State.FAILED)))
    controller = Controller(driver, POLICY, FileMemory(tmp_path / "state.json"), ControllerMetrics(registry))

    def given_up() -> float | None:
        return registry.get_sample_value("moebius_controller_worker_given_up", {"worker": "w"})

    await controller.look(100)
    assert given_up() == 1
    driver.hands_off = "another one leads"
    await controller.look(101)
    assert given_up() == 0


async def test_a_look_with_much_to_do_is_no_standstill(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[bool] = []

    class Slow(PlayedDriver):
        def view(self) -> View:
            return View([Observation("a"), Observation("b")])

        async def perform(self, action: Action) -> bool:
            if action.worker == "b":
                await asyncio.sleep(0)
                alive.append(played.controller.alive())
            return True

    played.driver = Slow()
    played.restart()
    monkeypatch.setattr(played.controller, "_turned_at", float("-inf"))
    assert not played.controller.alive()
    await played.controller.look(100)
    assert alive == [True]


async def test_who_does_not_lead_looks_and_does_nothing(played: Played) -> None:
    played.driver.hands_off = "another one leads"
    await played.controller.look(100)
    await played.controller.look(160)
    assert played.driver.looks == 2
    assert not played.driver.performed
    assert not played.state_file.exists()


async def test_a_new_leader_reads_what_was_done_by_the_one_before(played: Played) -> None:
    await played.controller.look(100)
    other = Played(played.driver, played.state_file)
    played.driver.die("it was killed by SIGKILL")
    await other.controller.look(110)
    await other.controller.look(112)
    assert [action.run for action in played.driver.performed] == [1, 2]
    # The first one leads again; by its own memory it would have to count the death once more.
    played.driver.term = 2
    await played.controller.look(113)
    assert played.state().history["w"].deaths == 1
    assert [action.run for action in played.driver.performed] == [1, 2]


async def test_what_could_not_be_done_is_tried_again(played: Played) -> None:
    class Refuses(PlayedDriver):
        refusals = 2

        async def perform(self, action: Action) -> bool:
            if self.refusals:
                self.refusals -= 1
                self.performed.append(action)
                return False
            return await super().perform(action)

    played.driver = Refuses()
    played.restart()
    for now in (100, 101, 102, 103):
        await played.controller.look(now)
    assert played.driver.performed == [Start("w", 1, FIRST)] * 3
    assert played.told() == [(What.STARTED, 1)]


async def test_a_memory_that_another_one_wrote_is_read_again(tmp_path: Path) -> None:
    class Shared(FileMemory):
        stale = False

        async def save(self, state: ControllerState) -> None:
            if self.stale:
                self.stale = False
                raise StaleMemoryError
            await super().save(state)

    memory, driver = Shared(tmp_path / "state.json"), PlayedDriver()
    controller = Controller(driver, POLICY, memory, ControllerMetrics(CollectorRegistry()))
    await controller.look(100)
    save_state(tmp_path / "state.json", ControllerState(1, {"other": Past(level=2)}))
    memory.stale = True
    driver.die("it was killed by SIGKILL")
    await controller.look(101)
    await controller.look(102)
    state = load_state(tmp_path / "state.json")
    assert state is not None
    assert state.history["other"].level == 2


async def test_a_memory_that_cannot_be_reached_is_no_empty_one(tmp_path: Path) -> None:
    class Away(FileMemory):
        async def load(self) -> ControllerState | None:
            raise OSError("no route to host")

    driver = PlayedDriver()
    controller = Controller(driver, POLICY, Away(tmp_path / "s"), ControllerMetrics(CollectorRegistry()))
    await controller.look(100)
    assert not driver.performed
