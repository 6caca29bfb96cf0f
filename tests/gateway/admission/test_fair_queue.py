"""Whose turn it is."""

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from moebius_gateway.admission.fair_queue import BYPASSES, PATIENCE, QUANTUM, Entry, FairQueue, Fit

HIGH, NORMAL, LOW = -1, 0, 1


def fits(entry: Entry[int]) -> Fit:
    return Fit.YES


def queue(*entries: tuple[str, int, int]) -> FairQueue[int]:
    """Of client, priority and cost."""
    made: FairQueue[int] = FairQueue()
    for number, (client, priority, cost) in enumerate(entries):
        made.push(Entry(client, priority, cost, number))
    return made


def order(of: FairQueue[int], fit: Callable[[Entry[int]], Fit] = fits) -> list[Entry[int]]:
    popped = []
    while (entry := of.pop(fit)) is not None:
        popped.append(entry)
    return popped


def test_one_client_s_come_in_their_order() -> None:
    assert [entry.item for entry in order(queue(*[("a", NORMAL, 10)] * 5))] == [0, 1, 2, 3, 4]


def test_a_flood_of_one_client_does_not_hold_up_another() -> None:
    popped = order(queue(*[("flood", NORMAL, 1000)] * 500, ("b", NORMAL, 1000), ("c", NORMAL, 1000)))
    places = {entry.client: place for place, entry in enumerate(popped) if entry.client != "flood"}
    assert max(places.values()) < 8


def test_clients_get_as_many_tokens_each_not_as_many_requests() -> None:
    both = [("long", NORMAL, 8000)] * 100 + [("short", NORMAL, 500)] * 1600
    given_out: Counter[str] = Counter()
    for entry in order(queue(*both))[:425]:
        given_out[entry.client] += entry.cost
    assert abs(given_out["long"] - given_out["short"]) < 16_000
    assert given_out["long"] > 190_000


def test_urgent_ones_go_first_but_the_others_are_not_forgotten() -> None:
    popped = order(queue(*[("l", LOW, 1)] * 40, *[("n", NORMAL, 1)] * 40, *[("h", HIGH, 1)] * 40))
    clients = [entry.client for entry in popped]
    assert clients[:PATIENCE] == ["h"] * PATIENCE
    assert {"n", "l"} <= set(clients[: 3 * PATIENCE])
    first = Counter(clients[:40])
    assert first["h"] > 3 * (first["n"] + first["l"]) / 2
    assert len(clients) == 120


def test_a_client_that_has_enough_is_passed_over() -> None:
    def fit(entry: Entry[int]) -> Fit:
        return Fit.CLIENT_FULL if entry.client == "a" else Fit.YES

    waiting = queue(*[("a", NORMAL, 1)] * 3, *[("b", NORMAL, 1)] * (2 * BYPASSES))
    assert [entry.client for entry in order(waiting, fit)] == ["b"] * 2 * BYPASSES
    assert len(waiting) == 3


def test_a_large_one_lets_some_smaller_ones_pass_then_all_wait_for_it() -> None:
    room = QUANTUM

    def fit(entry: Entry[int]) -> Fit:
        return Fit.YES if entry.cost <= room else Fit.TOO_LARGE

    waiting = queue(("big", NORMAL, 9000), *[("small", NORMAL, QUANTUM)] * (BYPASSES + 20))
    # Until the large one's turn has come, by its cost, the others do not pass it: they are before it.
    assert len(order(waiting, fit)) <= BYPASSES + 9000 // QUANTUM + 1
    room = 9000
    assert order(waiting, fit)[0].client == "big"


def test_what_is_taken_out_is_gone() -> None:
    waiting = queue(("a", NORMAL, 1), ("a", NORMAL, 1), ("b", LOW, 1))
    first, second, third = waiting
    waiting.remove(first)
    waiting.remove(third)
    assert [entry.item for entry in order(waiting)] == [second.item]
    assert len(waiting) == 0


def test_the_newest_of_the_least_urgent_and_longest_is_given_up_first() -> None:
    waiting = queue(("a", HIGH, 1), ("a", HIGH, 1), ("b", LOW, 1), ("c", LOW, 1), ("c", LOW, 1))
    entry, count = waiting.least()
    assert (entry.item, count) == (4, 2)


entries = st.tuples(st.sampled_from("abcd"), st.sampled_from([HIGH, NORMAL, LOW]), st.integers(1, 20_000))


@given(st.lists(entries, max_size=60))
def test_everything_comes_out_once(given_in: list[tuple[str, int, int]]) -> None:
    waiting = queue(*given_in)
    popped = order(waiting)
    assert sorted(entry.item for entry in popped) == list(range(len(given_in)))
    assert len(waiting) == 0
    for client in "abcd":
        for priority in (HIGH, NORMAL, LOW):
            own = [entry.item for entry in popped if (entry.client, entry.priority) == (client, priority)]
            assert own == sorted(own)


@given(st.lists(entries, min_size=1, max_size=40), st.data())
def test_counts_are_those_of_what_is_there(given_in: list[tuple[str, int, int]], data: st.DataObject) -> None:
    waiting = queue(*given_in)
    for _ in range(data.draw(st.integers(0, len(given_in)))):
        if data.draw(st.booleans()):
            waiting.pop(fits)
        elif len(waiting):
            waiting.remove(data.draw(st.sampled_from(list(waiting))))
    left = list(waiting)
    assert len(waiting) == len(left)
    for priority in (HIGH, NORMAL, LOW):
        expected = Counter(entry.client for entry in left if entry.priority <= priority)
        assert dict(waiting.waiting(priority)) == expected
