"""What sequences cost, what workers can take, and how long a turn takes to come."""

import pytest

from moebius_gateway.admission.forecast import FIRST_LENGTH, Experience, ahead, wait
from moebius_gateway.admission.room import Room, room
from moebius_gateway.workers.view import WorkerState, WorkerView


def worker(address: str = "a", **more: int) -> WorkerView:
    return WorkerView(address, WorkerState.READY, **({"max_running": 16, "kv_tokens": 16_000} | more))


def test_a_request_without_a_limit_does_not_reserve_the_whole_cache() -> None:
    """Eight chats that may each fill the context run side by side in a cache of that size."""
    costs = [Experience().cost(prompt=500, max_tokens=15_500)] * 8
    assert sum(costs) < 16_000
    assert Experience().cost(500, 3) == 503


def test_experience_follows_what_happens() -> None:
    seen = Experience()
    for _ in range(100):
        seen = seen.after(length=2000, seconds=10.0)
    assert seen.length == pytest.approx(2000, rel=0.01)
    assert seen.seconds == pytest.approx(10.0)
    assert Experience().length == FIRST_LENGTH


def test_the_room_of_all_workers_less_what_others_have_there() -> None:
    both = room([worker(), worker("b", load=10, in_flight=4, foreign_kv_tokens=6000)])
    assert both == Room(sequences=2 * 18 - 6, tokens=26_000)
    assert room([]).none


def test_where_a_cache_s_size_is_not_known_only_places_count() -> None:
    assert room([worker(), worker("b", kv_tokens=0)]).tokens is None


def test_fitting() -> None:
    there = Room(sequences=4, tokens=1000)
    assert there.fits(sequences=3, tokens=500, cost=500)
    assert not there.fits(sequences=3, tokens=501, cost=500)
    assert not there.fits(sequences=4, tokens=0, cost=1)
    # Alone it is the worker that says whether it fits.
    assert there.fits(sequences=0, tokens=0, cost=5000)
    assert not Room().fits(0, 0, 1)


def test_turns_go_round() -> None:
    assert ahead(0, []) == 0
    assert ahead(0, [500, 2]) == 2
    assert ahead(3, [500, 2]) == 3 + 4 + 2


def test_the_forecast_of_a_turn() -> None:
    busy = Experience(seconds=10.0)
    assert wait(0, running=20, experience=busy) == pytest.approx(0.5)
    assert wait(39, running=20, experience=busy) == pytest.approx(20.0)
    assert wait(39, running=0, experience=busy) == 0
    assert wait(39, running=20, experience=Experience()) == 0
