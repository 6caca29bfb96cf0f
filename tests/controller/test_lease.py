"""Who leads: one at a time, whatever clocks, conflicts and silences there are."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from moebius_controller.kubernetes.lease import Lease, micro_time
from tests.cluster_fakes import FakeApi
from tests.controller.cluster import LEASE
from tests.waiting import wait_for

DURATION = 1.0


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def contender(api: FakeApi, name: str, stack: ExitStack | None = None, duration: float = DURATION) -> Lease:
    """Starts it; `stack` stops it."""
    lease = Lease(api.client(), "default", "moebius-controller", name, duration, lambda: None)
    lease.start()
    if stack is not None:
        stack.callback(lease.stop)
    return lease


def spec(api: FakeApi) -> dict[str, object]:
    found = api.get(LEASE)
    assert found is not None
    return found["spec"]


def test_the_first_one_leads_and_goes_on(api: FakeApi, stack: ExitStack) -> None:
    first = contender(api, "a", stack, duration=9)
    wait_for(lambda: first.leading)
    assert first.term == 1
    second = contender(api, "b", stack, duration=9)
    held = first._until
    # Until it is renewed.
    while first._until == held:
        assert first.leading
        assert not second.leading
        time.sleep(0.02)
    assert first.leading
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"]) == ("a", 1)
    assert first.term == 1


def test_times_are_written_as_the_api_wants_them(api: FakeApi, stack: ExitStack) -> None:
    lease = contender(api, "a", stack)
    wait_for(lambda: lease.leading)
    for name in ("acquireTime", "renewTime"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|\+00:00)", str(spec(api)[name]))
    assert micro_time(datetime(2026, 1, 1, tzinfo=UTC)) == "2026-01-01T00:00:00.000001Z"


@pytest.mark.timed
def test_who_stops_gives_it_back(api: FakeApi, stack: ExitStack) -> None:
    first = contender(api, "a", duration=3)
    wait_for(lambda: first.leading)
    begun = time.monotonic()
    second = contender(api, "b", stack, duration=3)
    time.sleep(0.3)
    first.stop()
    assert not first.leading
    wait_for(lambda: second.leading)
    assert time.monotonic() - begun < 3, "it did not have to run out"
    assert spec(api)["leaseTransitions"] == 2


def test_one_that_died_is_succeeded_after_its_duration(api: FakeApi, stack: ExitStack) -> None:
    """Whatever the time is that it wrote: only that it does not change counts."""
    api.put(
        LEASE.rpartition("/")[0],
        {
            "kind": "Lease",
            "metadata": {"name": "moebius-controller"},
            "spec": {
                "holderIdentity": "dead",
                "leaseDurationSeconds": 1,
                "renewTime": "2099-01-01T00:00:00.000000Z",
                "leaseTransitions": 7,
            },
        },
    )
    begun = time.monotonic()
    lease = contender(api, "b", stack)
    wait_for(lambda: lease.leading)
    assert time.monotonic() - begun >= DURATION
    assert spec(api)["leaseTransitions"] == 8


def test_who_cannot_renew_it_stops_to_lead_before_another_may_begin(api: FakeApi, stack: ExitStack) -> None:
    lease = contender(api, "a", stack)
    wait_for(lambda: lease.leading)
    renewed = spec(api)["renewTime"]
    wait_for(lambda: spec(api)["renewTime"] != renewed)
    term = lease.term
    api.faults.refuse = 500
    assert lease._until < time.monotonic() + DURATION
    wait_for(lambda: not lease.leading)
    api.faults.refuse = None
    wait_for(lambda: lease.leading)
    assert lease.term > term, "it is to read again what was done meanwhile"


def test_an_api_server_that_is_slow_costs_no_leader(api: FakeApi, stack: ExitStack) -> None:
    """Each renewal takes a good part of the time between two."""
    lease = contender(api, "a", stack, duration=6)
    wait_for(lambda: lease.leading)
    slow = api.replace

    def replace(path: str, obj: dict[str, object]) -> tuple[int, dict[str, object]]:
        time.sleep(0.8)
        return slow(path, obj)

    api.replace = replace  # type: ignore[method-assign]
    held = lease._until
    # Until it is renewed.
    while lease._until == held:
        assert lease.leading
        time.sleep(0.02)
    assert lease.leading


def test_who_lost_it_leads_no_more(api: FakeApi, stack: ExitStack) -> None:
    lease = contender(api, "a", stack)
    wait_for(lambda: lease.leading)
    api.change(LEASE, lambda one: one["spec"].update(holderIdentity="b"))
    wait_for(lambda: not lease.leading)


def test_an_answer_that_is_no_lease_does_not_end_it(api: FakeApi, stack: ExitStack) -> None:
    collection, _, name = LEASE.rpartition("/")
    api.put(
        collection, {"metadata": {"name": name}, "spec": {"holderIdentity": "b", "leaseDurationSeconds": "?"}}
    )
    lease = contender(api, "a", stack)
    wait_for(lambda: len(api.asked) > 1)
    api.change(LEASE, lambda one: one["spec"].update(holderIdentity=""))
    wait_for(lambda: lease.leading)


def test_of_many_who_want_it_at_once_one_has_it(api: FakeApi, stack: ExitStack) -> None:
    contenders = [contender(api, f"c-{number}", stack, duration=9) for number in range(8)]
    wait_for(lambda: any(one.leading for one in contenders))
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert sum(one.leading for one in contenders) <= 1
        time.sleep(0.01)
    assert sum(one.term for one in contenders) == 1


def test_what_made_the_lease_still_owns_it(api: FakeApi, stack: ExitStack) -> None:
    """Helm leaves behind what has lost its labels."""
    owner = {
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "a"},
    }
    collection, _, name = LEASE.rpartition("/")
    api.put(collection, {"metadata": {"name": name, **owner}})
    lease = contender(api, "a", stack)
    wait_for(lambda: lease.leading)
    found = api.get(LEASE)
    assert found is not None
    assert found["metadata"].items() >= owner.items()
