"""What is done about one worker, case by case."""

import pytest

from moebius_controller.decide import (
    Action,
    GiveUp,
    Health,
    Kill,
    Observation,
    Past,
    Policy,
    Start,
    State,
    decide,
    remember,
    restart_delay,
)

POLICY = Policy(
    unresponsive_timeout=10,
    start_timeout=60,
    progress_timeout=900,
    restart_delay=1,
    max_restart_delay=8,
    healthy_after=300,
    max_deaths=6,
    retry_delay=60,
)
NOW = 1000.0
ALIVE = Past(started_at=900, started=3, dead=2, died_at=899, deaths=1)


def lives(
    state: State = State.READY, *, requests: int = 0, progress: float = 0, silence: float = 0, run: int = 3
) -> Observation:
    return Observation("w", run, None, Health(state, requests, progress, "no such tensor"), silence)


def gone(run: int = 3) -> Observation:
    return Observation("w", run, "it was killed by SIGKILL")


def died(ago: float, deaths: int = 1, given_up: int = 0) -> Past:
    """Run 3 is known to be dead."""
    return Past(NOW - ago - 50, NOW - ago, deaths, started=3, dead=3, given_up=given_up)


def only(seen: Observation, past: Past) -> Action | None:
    actions = decide([seen], {"w": past}, POLICY, NOW)
    assert len(actions) <= 1
    return actions[0] if actions else None


@pytest.mark.parametrize(
    ("seen", "past", "wanted"),
    [
        # Before the first process, and between a start that was decided and what is seen of it.
        (Observation("w"), Past(), Start),
        (Observation("w"), Past(started=1, started_at=NOW), None),
        (gone(run=2), ALIVE, None),
        # Nothing to repair.
        (lives(), ALIVE, None),
        (lives(requests=9), ALIVE, None),
        (lives(progress=5000), ALIVE, None),  # Idle: there is nothing to progress with.
        (lives(requests=9, progress=899), ALIVE, None),
        (lives(State.LOADING, progress=899), ALIVE, None),
        (lives(State.DRAINING, requests=9, progress=5000), ALIVE, None),
        (lives(State.RESTARTING, progress=5000), ALIVE, None),
        (lives(State.UNSPECIFIED, requests=9, progress=5000), ALIVE, None),  # Of a later version.
        (lives(silence=9.9), ALIVE, None),
        (Observation("w", 3, silence=59), ALIVE, None),
        # Alive, but not well.
        (lives(silence=10.1), ALIVE, Kill),
        (lives(State.LOADING, silence=10.1), ALIVE, Kill),
        (lives(State.DRAINING, silence=10.1), ALIVE, Kill),
        (lives(State.FAILED, silence=10.1), ALIVE, Kill),
        (lives(requests=1, progress=901), ALIVE, Kill),
        (lives(State.LOADING, progress=901), ALIVE, Kill),
        (Observation("w", 3, silence=61), ALIVE, Kill),
        (lives(silence=10.1), Past(started=3, killed=3), None),  # Killed, and not gone yet.
        (lives(silence=10.1), Past(started=3, killed=2), Kill),
        # Its engine cannot be started: said once, and left to a person.
        (lives(State.FAILED), ALIVE, GiveUp),
        (lives(State.FAILED), Past(started=3, given_up=3, given_up_at=NOW - 59), None),
        # What it lacked may be there again: a shared disk that was away, say.
        (lives(State.FAILED), Past(started=3, given_up=3, given_up_at=NOW - 61), Kill),
        # Dead: restarted after a delay.
        (gone(), ALIVE, None),  # The delay begins when the death is seen.
        (gone(), died(ago=0.1), None),
        (gone(), died(ago=1.3), Start),
        (gone(), died(ago=1.3, deaths=3), None),
        (gone(), died(ago=5.1, deaths=3), Start),
        (gone(), died(ago=1e6, deaths=5), Start),
        (gone(), died(ago=-500), Start),  # The clock was set back.
        # A crash loop: said once for each death, tried again after a long time.
        (gone(), died(ago=1, deaths=6), GiveUp),
        (gone(), died(ago=1, deaths=6, given_up=3), None),
        (gone(), died(ago=44, deaths=6, given_up=3), None),
        (gone(), died(ago=76, deaths=6, given_up=3), Start),
    ],
)
def test_one_look(seen: Observation, past: Past, wanted: type[Action] | None) -> None:
    action = only(seen, past)
    assert (None if action is None else type(action)) is wanted


def test_a_start_is_of_the_next_process_and_names_the_cause() -> None:
    assert only(gone(), died(ago=9)) == Start("w", 4, "it was killed by SIGKILL")


def test_a_kill_names_the_silence_or_the_stall() -> None:
    assert only(lives(silence=12), ALIVE) == Kill("w", 3, "it has not answered for 12 s")
    stalled = only(lives(requests=1, progress=950), ALIVE)
    assert stalled is not None
    assert "no progress for 950 s" in stalled.reason


def test_giving_up_says_why_and_what_comes() -> None:
    failed = only(lives(State.FAILED), ALIVE)
    assert failed == GiveUp("w", 3, "its engine cannot be started: no such tensor; the next try is in 60 s")
    loop = only(gone(), died(ago=1, deaths=6))
    assert loop is not None
    assert "died 6 times in a row" in loop.reason
    assert "it was killed by SIGKILL" in loop.reason
    assert "the next start is in" in loop.reason


def test_each_worker_is_judged_by_itself() -> None:
    seen = [Observation("a"), lives(silence=11), Observation("b", 1, "it exited with status 1")]
    history = {"w": ALIVE, "b": Past(started=1, started_at=1, died_at=1, deaths=1, dead=1)}
    actions = decide(seen, history, POLICY, NOW)
    assert [(type(action), action.worker) for action in actions] == [(Start, "a"), (Kill, "w"), (Start, "b")]


def test_a_death_is_counted_once_however_often_it_is_seen() -> None:
    history = {"w": ALIVE}
    for later in (0.0, 0.3, 0.6):
        history = remember(history, [gone()], [], POLICY, NOW + later)
    assert history["w"] == Past(900, NOW, deaths=2, started=3, dead=3)


def test_a_long_life_makes_up_for_earlier_deaths() -> None:
    past = Past(started_at=NOW - 300, died_at=NOW - 310, deaths=6, started=3, dead=2)
    assert remember({"w": past}, [gone()], [], POLICY, NOW)["w"].deaths == 1
    past = Past(started_at=NOW - 299, died_at=NOW - 310, deaths=6, started=3, dead=2)
    assert remember({"w": past}, [gone()], [], POLICY, NOW)["w"].deaths == 7


def test_workers_that_died_together_do_not_start_together() -> None:
    past = died(ago=0)
    delays = {restart_delay(f"worker-{number}", past, POLICY) for number in range(50)}
    assert len(delays) == 50
    assert 0.75 <= min(delays) < 0.8
    assert 1.2 < max(delays) < 1.25
