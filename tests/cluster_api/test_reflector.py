"""The reflector against an API server that misbehaves in the ways that real ones were reported to."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes import client
from structlog.testing import capture_logs

from moebius_cluster import reflector
from moebius_cluster.pods import Pod, pod_of
from moebius_cluster.reflector import Reflector
from tests.cluster_fakes import PODS, FakeApi, pod
from tests.cluster_http import line
from tests.waiting import PATIENCE, wait_for


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(reflector, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(reflector, "LONGEST_PAUSE", 0.1)
    with FakeApi() as api:
        yield api


class Seen:
    """A reflector's changes, as its user is told of them."""

    def __init__(self) -> None:
        self.changes = 0
        self.reflector: Reflector[Pod]

    def changed(self) -> None:
        self.changes += 1

    def names(self) -> list[str]:
        return sorted(one.name for one in self.reflector.objects().values())


@contextmanager
def watching(
    api: FakeApi,
    parse: Callable[[dict[str, Any]], Pod] = pod_of,
    selector: str = "app=worker",
    **times: float,
) -> Iterator[Seen]:
    seen = Seen()
    call = partial(client.CoreV1Api(api.client()).list_namespaced_pod, "default", label_selector=selector)
    seen.reflector = Reflector(call, parse, on_change=seen.changed, **times)
    seen.reflector.start()
    try:
        yield seen
    finally:
        seen.reflector.stop()


def lists(api: FakeApi) -> int:
    return sum("watch" not in one.query for one in api.asked)


def test_objects_come_change_and_go_by_one_list_and_one_watch(api: FakeApi) -> None:
    api.put(PODS, pod("a", "10.0.0.1"))
    with watching(api) as seen:
        wait_for(lambda: seen.names() == ["a"])
        assert seen.reflector.synced
        wait_for(lambda: api.watches() >= 1)
        api.put(PODS, pod("b", "10.0.0.2"))
        wait_for(lambda: seen.names() == ["a", "b"])
        snapshot = seen.reflector.objects()
        api.change(f"{PODS}/a", lambda raw: raw["status"].update(podIP="10.0.0.9"))
        wait_for(lambda: "10.0.0.9" in {one.ip for one in seen.reflector.objects().values()})
        assert {one.ip for one in snapshot.values()} == {"10.0.0.1", "10.0.0.2"}, "snapshots do not change"
        api.remove(f"{PODS}/a")
        wait_for(lambda: seen.names() == ["b"])
        assert (lists(api), api.watches()) == (1, 1)
        assert seen.changes == 4
        asked = api.asked[-1].query
        assert asked["labelSelector"] == "app=worker"
        assert asked["allowWatchBookmarks"].lower() == "true"
        assert 0 < int(asked["timeoutSeconds"]) <= 60


def test_what_leaves_the_selector_is_gone(api: FakeApi) -> None:
    api.put(PODS, pod("a"))
    with watching(api) as seen:
        wait_for(lambda: seen.names() == ["a"])
        api.change(f"{PODS}/a", lambda raw: raw["metadata"].update(labels={"app": "other"}))
        wait_for(lambda: seen.names() == [])
        api.change(f"{PODS}/a", lambda raw: raw["metadata"].update(labels={"app": "worker"}))
        wait_for(lambda: seen.names() == ["a"])
        assert lists(api) == 1


@pytest.mark.timed
def test_a_watch_that_ends_in_time_goes_on_where_it_was(api: FakeApi) -> None:
    with watching(api, watch_timeout=1.0, silence_timeout=30.0) as seen:
        wait_for(lambda: seen.reflector.synced)
        begun, watches = time.monotonic(), api.watches()
        wait_for(lambda: api.watches() >= watches + 2)
        # Nothing has come since but ends and beginnings of watches: they are signs of life.
        assert seen.reflector.age() < time.monotonic() - begun
        api.put(PODS, pod("a"))
        wait_for(lambda: seen.names() == ["a"])
        assert lists(api) == 1


def test_what_happens_between_two_watches_is_not_missed(api: FakeApi) -> None:
    api.put(PODS, pod("a"))
    with watching(api) as seen:
        wait_for(lambda: seen.names() == ["a"])
        # While nobody watches; and the change itself is forgotten.
        api.faults.list_delay = 0.1
        api.drop_watches()
        api.remove(f"{PODS}/a")
        api.forget()
        wait_for(lambda: seen.names() == [])
        assert lists(api) == 2


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_version_that_is_gone_leads_to_a_list(api: FakeApi, how: str) -> None:
    with watching(api, watch_timeout=1.0, silence_timeout=2.0) as seen:
        wait_for(lambda: api.watches() >= 1)
        api.faults.gone = how
        wait_for(lambda: lists(api) >= 3)
        api.put(PODS, pod("a"))
        wait_for(lambda: seen.names() == ["a"])
        api.faults.gone = None
        api.put(PODS, pod("b"))
        wait_for(lambda: seen.names() == ["a", "b"])


def test_a_version_that_was_compacted_meanwhile_leads_to_a_list(api: FakeApi) -> None:
    with watching(api, watch_timeout=1.0, silence_timeout=2.0) as seen:
        wait_for(lambda: api.watches() >= 1)
        api.faults.bookmarks = False
        api.put(PODS, pod("a", labels={"app": "other"}))
        api.put(PODS, pod("b"))
        api.put(PODS, pod("c", labels={"app": "other"}))
        api.forget()
        wait_for(lambda: lists(api) >= 2)
        wait_for(lambda: seen.names() == ["b"])


@pytest.mark.timed
def test_a_silent_watch_heals(api: FakeApi) -> None:
    """Accepted, and then nothing: for 22 hours, in the case reported."""
    api.put(PODS, pod("a"))
    with watching(api, watch_timeout=1.0, silence_timeout=1.3) as seen:
        wait_for(lambda: seen.names() == ["a"])
        api.faults.silent = True
        api.drop_watches()
        wait_for(lambda: api.watches() >= 2)
        api.remove(f"{PODS}/a")
        wait_for(lambda: seen.reflector.age() > 0.3)
        assert seen.names() == ["a"]
        wait_for(lambda: seen.names() == [])


def test_lists_are_repeated_whatever_the_watch_says(api: FakeApi) -> None:
    with watching(api, relist_interval=1.2, watch_timeout=600.0, silence_timeout=750.0) as seen:
        wait_for(lambda: lists(api) >= 2)
        assert api.watches() >= 1
        assert seen.changes == 1, "nobody is told of what did not change"


def test_a_connection_cut_off_is_made_again(api: FakeApi) -> None:
    with watching(api) as seen:
        for count in range(1, 4):
            wait_for(lambda: api.watches() >= count)  # noqa: B023
            api.drop_watches()
        api.put(PODS, pod("a"))
        wait_for(lambda: seen.names() == ["a"])


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe{\n", b'{"type": "ADDED"}\n', b"[]\n", b'{"type": "ADDED", "object": 3}\n']
)
def test_garbage_on_the_watch_leads_to_a_list(api: FakeApi, raw: bytes) -> None:
    with watching(api) as seen:
        wait_for(lambda: api.watches() >= 1)
        api.say(raw)
        wait_for(lambda: api.watches() >= 2)
        api.put(PODS, pod("a"))
        wait_for(lambda: seen.names() == ["a"])
        assert lists(api) == 2


def test_an_empty_line_and_an_unknown_kind_of_event_are_nothing(api: FakeApi) -> None:
    with watching(api) as seen:
        wait_for(lambda: api.watches() >= 1)
        api.say(b"\n")
        api.say(b'{"type": "LATER", "object": {"metadata": {"resourceVersion": "4"}}}\n')
        api.put(PODS, pod("a"))
        wait_for(lambda: seen.names() == ["a"])
        assert lists(api) == 1


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_refusal_leaves_what_is_known_and_is_asked_again_ever_more_slowly(
    api: FakeApi, status: int
) -> None:
    api.put(PODS, pod("a"))
    with watching(api) as seen:
        wait_for(lambda: seen.names() == ["a"] and api.watches() == 1)
        api.faults.refuse = status
        before, begun = len(api.asked), time.monotonic()
        api.drop_watches()
        api.remove(f"{PODS}/a")
        wait_for(lambda: len(api.asked) > before)
        refused = time.monotonic()
        wait_for(lambda: len(api.asked) >= before + 8)
        # Half of the longest pause is the least; those before the third are shorter.
        assert len(api.asked) - before <= 3 + (time.monotonic() - begun) / 0.05
        assert seen.names() == ["a"]
        assert time.monotonic() - refused < seen.reflector.age()
        back = time.monotonic()
        api.faults.refuse = None
        wait_for(lambda: seen.names() == [])
        assert seen.reflector.age() < time.monotonic() - back


def test_a_right_that_is_missing_is_named_once(api: FakeApi) -> None:
    api.faults.refuse = 403
    with capture_logs() as logs, watching(api):
        wait_for(lambda: len(api.asked) >= 5)
    told = [line["why"] for line in logs if line["log_level"] == "warning"]
    assert told == ["403: pods is forbidden"]


def test_nothing_is_known_until_a_list_succeeded(api: FakeApi) -> None:
    api.faults.refuse = 403
    with watching(api) as seen:
        wait_for(lambda: len(api.asked) >= 3)
        assert not seen.reflector.synced
        assert seen.changes == 0
        api.faults.refuse = None
        wait_for(lambda: seen.reflector.synced)
        assert seen.names() == []
        assert seen.changes == 1, "also of an empty list"


def test_an_api_server_that_is_away_leaves_what_is_known(api: FakeApi) -> None:
    api.put(PODS, pod("a"))
    with watching(api) as seen:
        wait_for(lambda: seen.names() == ["a"] and api.watches() == 1)
        api.go()
        time.sleep(0.3)
        assert seen.names() == ["a"]
        assert seen.reflector.synced
        assert seen.reflector.age() >= 0.25
        api.put(PODS, pod("b"))
        api.come()
        wait_for(lambda: seen.names() == ["a", "b"])


@pytest.mark.timed
def test_a_slow_list_holds_nobody_up(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "LIST_TIMEOUT", 0.6)
    api.faults.list_delay = 3.0
    with watching(api) as seen:
        assert seen.names() == []
        assert seen.reflector.age() < 0.6, "starting it did not take as long as a list"
        wait_for(lambda: lists(api) >= 2)
        assert not seen.reflector.synced
        api.faults.list_delay = 0.0
        wait_for(lambda: seen.reflector.synced)


@pytest.mark.parametrize("faults", [{"refuse": 503}, {"gone": "status"}])
def test_lists_that_take_long_and_are_in_vain_are_tried_ever_more_slowly(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any]
) -> None:
    """Each failure takes longer than the longest pause, which is not to have worked for long."""
    # A second goes by with each list, and with nothing else.
    monkeypatch.setattr(reflector, "time", SimpleNamespace(monotonic=lambda: float(lists(api))))
    in_a_row: list[int] = []

    def no_pause(first: float, doublings: int, longest: float) -> float:
        in_a_row.append(doublings)
        return 0.0

    monkeypatch.setattr(reflector, "backoff", no_pause)
    for name, value in faults.items():
        setattr(api.faults, name, value)
    with watching(api):
        wait_for(lambda: len(in_a_row) >= 3)
    assert in_a_row[:3] == [1, 2, 3]


def test_watches_that_end_at_once_do_not_make_a_storm(api: FakeApi) -> None:
    api.faults.hasty = True
    begun = time.monotonic()
    with watching(api):
        wait_for(lambda: api.watches() >= 8)
        # Half of the longest pause is the least; those before the third are shorter.
        assert api.watches() <= 3 + (time.monotonic() - begun) / 0.05


def test_one_object_that_cannot_be_read_is_left_out(api: FakeApi) -> None:
    def parse(raw: dict[str, Any]) -> Pod:
        if raw["metadata"].get("annotations", {}).get("bad"):
            raise ValueError("bad")
        return pod_of(raw)

    api.put(PODS, pod("a", annotations={"bad": "yes"}))
    api.put(PODS, pod("b"))
    with watching(api, parse) as seen:
        wait_for(lambda: seen.names() == ["b"])
        api.change(f"{PODS}/b", lambda raw: raw["metadata"].update(annotations={"bad": "yes"}))
        wait_for(lambda: seen.names() == [])
        api.change(f"{PODS}/a", lambda raw: raw["metadata"].update(annotations={}))
        wait_for(lambda: seen.names() == ["a"])
        assert lists(api) == 1


def test_the_same_name_with_another_uid_is_another_object(api: FakeApi) -> None:
    first = api.put(PODS, pod("a"))
    with watching(api) as seen:
        wait_for(lambda: seen.names() == ["a"])
        api.remove(f"{PODS}/a")
        second = api.put(PODS, pod("a"))
        wait_for(lambda: list(seen.reflector.objects()) == [second["metadata"]["uid"]])
        # What is said late of the first is not about the second.
        late = {**first, "metadata": {**first["metadata"], "resourceVersion": "99"}}
        api.say(line("DELETED", late))
        api.put(PODS, pod("b"))
        wait_for(lambda: seen.names() == ["a", "b"])


def test_a_user_that_raises_is_told_again(api: FakeApi) -> None:
    with watching(api) as seen:
        told = threading.Event()

        def raises() -> None:
            told.set()
            raise RuntimeError("no")

        seen.reflector._tell = raises
        wait_for(lambda: api.watches() >= 1)
        told.clear()
        api.put(PODS, pod("a"))
        assert told.wait(PATIENCE)
        told.clear()
        api.put(PODS, pod("b"))
        assert told.wait(PATIENCE)
        assert seen.names() == ["a", "b"]
        assert lists(api) == 1


def test_stopping_ends_the_thread_and_is_told_nobody(api: FakeApi) -> None:
    before = set(threading.enumerate())
    with watching(api) as seen:
        wait_for(lambda: api.watches() >= 1)
        (thread,) = [one for one in threading.enumerate() if one.name == "reflector" and one not in before]
        changes = seen.changes
        seen.reflector.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        api.put(PODS, pod("a"))
        assert seen.changes == changes


def test_hundreds_of_pods_that_change(api: FakeApi) -> None:
    for number in range(300):
        api.put(PODS, pod(f"w-{number}", f"10.0.{number // 250}.{number % 250}"))
    with watching(api) as seen:
        wait_for(lambda: len(seen.names()) == 300)
        for number in range(300):
            if number % 3:
                api.remove(f"{PODS}/w-{number}")
            else:
                api.change(f"{PODS}/w-{number}", lambda raw: raw["status"].update(podIP="10.9.0.1"))
        wait_for(
            lambda: (
                len(seen.names()) == 100
                and {one.ip for one in seen.reflector.objects().values()} == {"10.9.0.1"}
            )
        )
        assert lists(api) == 1
