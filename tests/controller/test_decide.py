"""What is done about one worker, case by case: processes of this machine, which nobody else starts."""

from dataclasses import replace

import pytest

from moebius_controller.decide import decide
from moebius_controller.history import remember
from moebius_controller.policy import Policy, restart_delay
from moebius_controller.types import (
    Action,
    Cause,
    GiveUp,
    Health,
    Observation,
    Past,
    Replace,
    SetLevel,
    Start,
    State,
    Trouble,
)

POLICY = Policy(restart_delay=1, max_restart_delay=8, healthy_after=300, retry_delay=60)
NOW = 1000.0
ALIVE = Past(started_at=900, seen=3, started=3, dead=2, died_at=899, deaths=1, engine_run=3)


def lives(
    state: State = State.READY, *, requests: int = 0, progress: float = 0, silence: float = 0, run: int = 3
) -> Observation:
    return Observation("w", run, None, Health(state, requests, progress, "no such tensor"), silence)


def gone(run: int = 3) -> Observation:
    return Observation("w", run, "it was killed by SIGKILL")


def died(ago: float, deaths: int = 1, given_up_ago: float | None = None) -> Past:
    """Run 3 is known to be dead."""
    given_up_at = 0.0 if given_up_ago is None else NOW - given_up_ago
    return Past(NOW - ago - 50, NOW - ago, deaths, seen=3, started=3, dead=3, given_up_at=given_up_at)


def failed(given_up_ago: float) -> Past:
    return replace(ALIVE, given_up_at=NOW - given_up_ago, failed_at=NOW - given_up_ago)


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
        (lives(silence=10.1), ALIVE, Replace),
        (lives(State.LOADING, silence=10.1), ALIVE, Replace),
        (lives(State.DRAINING, silence=10.1), ALIVE, Replace),
        (lives(State.FAILED, silence=10.1), ALIVE, Replace),
        (lives(requests=1, progress=901), ALIVE, Replace),
        (lives(State.LOADING, progress=901), ALIVE, Replace),
        (Observation("w", 3, silence=61), ALIVE, Replace),
        (lives(silence=10.1), replace(ALIVE, replaced=3), None),  # Killed, and not gone yet.
        (lives(silence=10.1), replace(ALIVE, replaced=2), Replace),
        # Its engine cannot be started: said once, and left to a person.
        (lives(State.FAILED), ALIVE, GiveUp),
        (lives(State.FAILED), failed(given_up_ago=44), None),
        # What it lacked may be there again: a shared disk that was away, say.
        (lives(State.FAILED), failed(given_up_ago=76), Replace),
        # Dead: restarted after a delay.
        (gone(), ALIVE, None),  # The delay begins when the death is seen.
        (gone(), died(ago=0.1), None),
        (gone(), died(ago=1.3), Start),
        (gone(), died(ago=1.3, deaths=3), None),
        (gone(), died(ago=5.1, deaths=3), Start),
        (gone(), died(ago=1e6, deaths=5), Start),
        (gone(), died(ago=-500), Start),  # The clock was set back.
        # A crash loop: said once for each try, tried again after a long time.
        (gone(), died(ago=1, deaths=6), GiveUp),
        (gone(), died(ago=1, deaths=6, given_up_ago=1), None),
        (gone(), died(ago=44, deaths=6, given_up_ago=44), None),
        (gone(), died(ago=76, deaths=6, given_up_ago=76), Start),
    ],
)
def test_one_look(seen: Observation, past: Past, wanted: type[Action] | None) -> None:
    action = only(seen, past)
    assert (None if action is None else type(action)) is wanted


def test_a_start_is_of_the_next_process_and_names_the_cause() -> None:
    assert only(gone(), died(ago=9)) == Start("w", 4, Cause(Trouble.DEAD, "it was killed by SIGKILL"))


def test_a_kill_names_the_silence_or_the_stall() -> None:
    assert only(lives(silence=12), ALIVE) == Replace(
        "w", 3, Cause(Trouble.SILENT, "it has not answered for 12 s")
    )
    stalled = only(lives(requests=1, progress=950), ALIVE)
    assert stalled is not None
    assert "no progress for 950 s" in stalled.cause.reason


def test_giving_up_says_why_and_what_comes() -> None:
    said = only(lives(State.FAILED), ALIVE)
    assert said is not None
    delay = restart_delay("w", replace(ALIVE, given_up_at=NOW), POLICY)
    reason = f"its engine cannot be started: no such tensor; the next try is in {delay:.0f} s"
    assert said == GiveUp("w", 3, Cause(Trouble.FAILED, reason))
    loop = only(gone(), died(ago=1, deaths=6))
    assert loop is not None
    assert "died 6 times in a row" in loop.cause.reason
    assert "it was killed by SIGKILL" in loop.cause.reason
    assert "the next try is in" in loop.cause.reason


def test_each_worker_is_judged_by_itself() -> None:
    seen = [Observation("a"), lives(silence=11), Observation("b", 1, "it exited with status 1")]
    history = {"w": ALIVE, "b": Past(seen=1, started=1, started_at=1, died_at=1, deaths=1, dead=1)}
    actions = decide(seen, history, POLICY, NOW)
    assert [(type(action), action.worker) for action in actions] == [
        (Start, "a"),
        (Replace, "w"),
        (Start, "b"),
    ]


def test_a_death_is_counted_once_however_often_it_is_seen() -> None:
    history = {"w": ALIVE}
    for later in (0.0, 0.3, 0.6):
        history = remember(history, [gone()], [], POLICY, NOW + later)
    assert history["w"] == replace(ALIVE, died_at=NOW, deaths=2, dead=3)


def test_a_kill_and_the_death_by_it_are_one() -> None:
    seen = lives(silence=12)
    history = remember({"w": ALIVE}, [seen], decide([seen], {"w": ALIVE}, POLICY, NOW), POLICY, NOW)
    assert (history["w"].deaths, history["w"].replaced) == (2, 3)
    history = remember(history, [gone()], [], POLICY, NOW + 0.2)
    assert (history["w"].deaths, history["w"].dead) == (2, 3)


def test_a_long_life_makes_up_for_earlier_deaths() -> None:
    past = replace(ALIVE, started_at=NOW - 300, died_at=NOW - 310, deaths=6)
    assert remember({"w": past}, [gone()], [], POLICY, NOW)["w"].deaths == 1
    past = replace(past, started_at=NOW - 299)
    assert remember({"w": past}, [gone()], [], POLICY, NOW)["w"].deaths == 7


def test_workers_that_died_together_do_not_start_together() -> None:
    past = died(ago=0)
    delays = {restart_delay(f"worker-{number}", past, POLICY) for number in range(50)}
    assert len(delays) == 50
    assert 0.75 <= min(delays) < 0.8
    assert 1.2 < max(delays) < 1.25


def test_the_level_is_remembered_for_a_process_that_does_not_have_it() -> None:
    past = replace(died(ago=9), level=2, level_reason="its engine died", level_body=2)
    assert only(gone(), past) == SetLevel("w", 3, Cause(None, "its engine died"), 2)
    assert isinstance(only(gone(), replace(past, level_body=3)), Start)


def test_another_command_line_begins_anew() -> None:
    past = replace(died(ago=9, deaths=5, given_up_ago=9), level=2, revision="old")
    seen = replace(gone(), revision="new", level=2)
    action = only(seen, past)
    assert isinstance(action, SetLevel)
    assert action.level == 0
    after = remember({"w": past}, [seen], [action], POLICY, NOW)["w"]
    assert (after.level, after.deaths, after.given_up_at, after.dead) == (0, 0, 0, 3)
    assert isinstance(decide([replace(seen, level=0)], {"w": after}, POLICY, NOW)[0], Start)
