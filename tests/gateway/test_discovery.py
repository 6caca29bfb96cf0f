"""Workers found by watching pods: who is one, what happens to streams when pods come, go and are replaced."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial

import pytest
from kubernetes import client

from moebius_cluster import reflector
from moebius_cluster.pods import Pod
from moebius_gateway.types import GenerationError, Reason
from moebius_gateway.workers.discovery import Discovery, DiscoveryOptions, discover, members_of
from moebius_gateway.workers.dispatcher import DispatcherOptions
from moebius_gateway.workers.member import Member
from moebius_gateway.workers.routing import prefix_blocks
from moebius_gateway.workers.view import WorkerState
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.cluster_fakes import PODS, FakeApi, now, pod
from tests.cluster_http import line
from tests.gateway.dispatching import Gateway, Seen, consume, generation
from tests.gateway.worker_standin import Plan, StandIn, serving, undisturbed
from tests.waiting import until

SLOW = Plan(rate=100)
PROMPT = tuple(range(3, 90))


def of(name: str, ip: str, **fields: object) -> Pod:
    made = Pod(name, uid=f"uid-{name}", ip=ip, phase="Running", ports={"grpc": 7601}, created_at=1.0)
    return replace(made, **fields)  # type: ignore[arg-type]


def test_pods_that_are_workers() -> None:
    pods = [
        of("a", "10.0.0.1"),
        of("starts", "10.0.0.2", phase="Pending", ready=False),
        of("no-address", ""),
        of("no-port", "10.0.0.3", ports={"metrics": 9401}),
        of("evicted", "10.0.0.4", phase="Failed"),
        of("done", "10.0.0.5", phase="Succeeded"),
        of("leaves", "10.0.0.6", deletion=99.0, ready=True),
    ]
    assert members_of(pods) == [
        Member("10.0.0.6:7601", "leaves", "uid-leaves", retiring=True),
        Member("10.0.0.1:7601", "a", "uid-a"),
        Member("10.0.0.2:7601", "starts", "uid-starts"),
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_the_newest_of_those_that_share_a_name_or_an_address(turned: bool) -> None:
    pods = [
        of("a", "10.0.0.1", created_at=5.0),
        of("a", "10.0.0.2", uid="old", created_at=4.0),
        of("b", "10.0.0.3", created_at=5.0),
        of("c", "10.0.0.3", created_at=6.0, deletion=9.0),
    ]
    found = members_of(reversed(pods) if turned else pods)
    assert {member.uid for member in found} == {"uid-a", "uid-b"}


class Fleet:
    """A dispatcher that finds its workers in a fake cluster, and the workers."""

    def __init__(self, api: FakeApi, gateway: Gateway) -> None:
        self.api = api
        self.gateway = gateway
        self.workers: dict[str, StandIn] = {}
        self.ports: dict[str, int] = {}
        self.stack = contextlib.AsyncExitStack()

    async def add(self, name: str, plan: Plan = SLOW) -> StandIn:
        """A worker with a pod; returns when it is ready."""
        worker = self.workers[name] = StandIn(plan, name=name)
        self.ports[name] = await self.stack.enter_async_context(serving(worker))
        self.api.put(PODS, pod(name, "127.0.0.1", port=self.ports[name]))
        await until(lambda: self.ready(name))
        return worker

    def ready(self, name: str) -> bool:
        return any(view.name == name for view in self.gateway.ready_workers("standin"))

    def names(self) -> set[str]:
        return {view.name for view in self.gateway.workers()}

    def state(self, name: str) -> WorkerState:
        (state,) = [view.state for view in self.gateway.workers() if view.name == name]
        return state

    async def begin(self, seed: int = 1) -> "asyncio.Task[Seen]":
        """A stream of 60 tokens that runs."""
        seen = Seen()
        wanted = generation(PROMPT, seed=seed, max_tokens=60)
        task = asyncio.create_task(consume(self.gateway, wanted, seen))
        await until(lambda: len(seen.tokens) > 3)
        return task


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(reflector, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(reflector, "LONGEST_PAUSE", 0.1)
    with FakeApi() as api:
        yield api


@contextlib.asynccontextmanager
async def fleet(api: FakeApi) -> AsyncIterator[Fleet]:
    built = Gateway(DispatcherOptions())
    core = client.CoreV1Api(api.client())
    pods = partial(core.list_namespaced_pod, "default", label_selector="app=worker")
    discovery = Discovery(pods, built.set_workers)
    it = Fleet(api, built)
    async with it.stack:
        await built.start()
        discovery.start()
        try:
            await until(lambda: discovery.reflector.synced)
            yield it
        finally:
            discovery.stop()
            await built.stop()


def exact(seen: Seen, seed: int = 1) -> bool:
    return tuple(seen.tokens) == undisturbed(PROMPT, seed, 60)


async def test_pods_become_workers_with_their_names(api: FakeApi) -> None:
    async with fleet(api) as it:
        with pytest.raises(GenerationError) as failed:
            await consume(it.gateway, generation())
        assert failed.value.reason is Reason.NOT_READY
        await it.add("w-0")
        assert it.gateway.metric("worker_up", worker="w-0") == 1
        assert it.gateway.metric("workers", state="READY") == 1
        seen = await consume(it.gateway, generation(PROMPT, max_tokens=60))
        assert exact(seen)


async def test_a_pod_without_an_address_is_no_worker_yet(api: FakeApi) -> None:
    async with fleet(api) as it:
        worker = StandIn(Plan(), name="w-0")
        async with serving(worker) as port:
            api.put(PODS, pod("w-0", None, port=port, phase="Pending"))
            await asyncio.sleep(0.2)
            assert it.names() == set()
            api.change(f"{PODS}/w-0", lambda raw: raw["status"].update(podIP="127.0.0.1", phase="Running"))
            await until(lambda: it.ready("w-0"))
            # Evicted: it arrives as a change, without an address.
            api.change(f"{PODS}/w-0", lambda raw: raw["status"].update(podIP=None, phase="Failed"))
            await until(lambda: it.names() == set())


async def test_a_ready_pod_whose_worker_is_not_gets_nothing(api: FakeApi) -> None:
    async with fleet(api) as it:
        worker = StandIn(Plan(), name="w-0")
        worker.state = pb.STATE_LOADING
        async with serving(worker) as port:
            api.put(PODS, pod("w-0", "127.0.0.1", port=port))
            await until(lambda: it.names() == {"w-0"} and it.state("w-0") is WorkerState.LOADING)
            assert not it.gateway.ready()
            worker.become(pb.STATE_READY)
            await until(it.gateway.ready)


async def test_a_pod_that_is_deleted_gets_nothing_new_and_finishes_what_it_has(api: FakeApi) -> None:
    async with fleet(api) as it:
        await it.add("w-0")
        stream = await it.begin()
        await it.add("w-1")
        # Its worker still says that it is ready, and so does the pod.
        api.change(f"{PODS}/w-0", lambda raw: raw["metadata"].update(deletionTimestamp=now(30)))
        await until(lambda: not it.ready("w-0"))
        assert it.state("w-0") is WorkerState.DRAINING
        before = len(it.workers["w-0"].submits)
        for seed in range(2, 8):
            await consume(it.gateway, generation(seed=seed, max_tokens=2))
        assert len(it.workers["w-0"].submits) == before
        assert exact(await stream)
        assert it.gateway.metric("migrations_total", reason="ENGINE_DEAD", outcome="resumed") == 0
        api.remove(f"{PODS}/w-0")
        await until(lambda: it.names() == {"w-1"})
        assert it.gateway.metric("workers", state="READY") == 1
        assert it.gateway.metric("workers", state="UNREACHABLE") == 0
        assert it.gateway.registry.get_sample_value("moebius_gateway_worker_up", {"worker": "w-0"}) is None


async def test_a_pod_that_is_gone_ends_its_link_and_its_streams_go_on_without_blame(api: FakeApi) -> None:
    async with fleet(api) as it:
        await it.add("w-0")
        stream = await it.begin()
        await it.add("w-1")
        # Forced away: its process still serves.
        api.remove(f"{PODS}/w-0")
        await until(lambda: it.names() == {"w-1"})
        assert exact(await stream)
        assert it.gateway.metric("strikes_total") == 0
        await until(lambda: it.workers["w-0"].gateways == 0)
        assert it.gateway.idle()


async def test_streams_wait_while_no_pod_is_there(api: FakeApi) -> None:
    async with fleet(api) as it:
        await it.add("w-0")
        stream = await it.begin()
        it.workers["w-0"].paused = True
        api.remove(f"{PODS}/w-0")
        await until(lambda: it.gateway.metric("streams_waiting") == 1)
        await it.add("w-1")
        assert exact(await stream)


async def test_a_pod_that_leaves_the_selector_is_no_worker(api: FakeApi) -> None:
    async with fleet(api) as it:
        await it.add("w-0")
        api.change(f"{PODS}/w-0", lambda raw: raw["metadata"].update(labels={"app": "quarantine"}))
        await until(lambda: it.names() == set())
        api.change(f"{PODS}/w-0", lambda raw: raw["metadata"].update(labels={"app": "worker"}))
        await until(lambda: it.ready("w-0"))


async def test_a_worker_that_restarts_in_its_pod_rejoins_at_the_same_address(api: FakeApi) -> None:
    async with fleet(api) as it:
        first = StandIn(Plan(), name="first")
        async with serving(first) as port:
            api.put(PODS, pod("w-0", "127.0.0.1", port=port))
            await until(lambda: it.ready("w-0"))
        await until(lambda: not it.ready("w-0"))
        assert it.names() == {"w-0"}
        async with serving(StandIn(Plan(), name="second"), port):
            await until(lambda: it.ready("w-0"))
            assert it.gateway.metric("attach_reconnects_total", worker="w-0") == 1


async def test_another_pod_at_the_same_address_is_another_worker(api: FakeApi) -> None:
    """Nothing that was learnt about the first holds for the second: prefixes, deaths, counters."""
    async with fleet(api) as it:
        first = StandIn(Plan(), name="one")
        async with serving(first) as port:
            api.put(PODS, pod("w-0", "127.0.0.1", port=port))
            await until(lambda: it.ready("w-0"))
            await consume(it.gateway, generation(PROMPT, max_tokens=1))
            blocks = prefix_blocks(PROMPT, "standin")
            assert it.gateway._prefixes.match(blocks)
            (link,) = it.gateway._links.values()
            for _ in range(3):
                link._lost()
            assert it.gateway.workers()[0].on_trial
            uid = (api.get(f"{PODS}/w-0") or {})["metadata"]["uid"]
            # The deletion is missed; what is seen is another pod at the address.
            first.name = "other"
            api.drop_watches()
            api.remove(f"{PODS}/w-0")
            api.put(PODS, pod("w-1", "127.0.0.1", port=port))
            api.forget()
            await until(lambda: it.names() == {"w-1"} and it.ready("w-1"))
            assert next(iter(it.gateway._links.values())).member.uid != uid
            assert not it.gateway._prefixes.match(blocks)
            assert not it.gateway.workers()[0].on_trial
            assert it.gateway.metric("ejections_total", worker="w-1") == 0
            await until(lambda: first.gateways == 1)


async def test_a_late_word_about_the_pod_before_does_not_remove_the_one_that_is_there(api: FakeApi) -> None:
    async with fleet(api) as it:
        worker = await it.add("w-0")
        old = api.get(f"{PODS}/w-0") or {}
        api.remove(f"{PODS}/w-0")
        await until(lambda: it.names() == set())
        api.put(PODS, pod("w-0", "127.0.0.1", port=it.ports["w-0"]))
        await until(lambda: it.ready("w-0"))
        api.say(line("DELETED", old))
        await asyncio.sleep(0.2)
        assert it.ready("w-0")
        assert worker.gateways == 1


async def test_a_gateway_serves_its_last_known_workers_while_the_api_server_is_away(api: FakeApi) -> None:
    async with fleet(api) as it:
        await it.add("w-0")
        stream = await it.begin()
        api.go()
        for seed in range(2, 5):
            assert exact(await consume(it.gateway, generation(PROMPT, seed=seed, max_tokens=60)), seed)
        assert exact(await stream)
        assert it.names() == {"w-0"}
        api.remove(f"{PODS}/w-0")
        api.come()
        await it.add("w-1")
        await until(lambda: it.names() == {"w-1"})


async def test_a_rollout_is_never_without_a_worker_and_breaks_no_stream(api: FakeApi) -> None:
    async with fleet(api) as it:
        for name in ("w-0", "w-1"):
            await it.add(name)
        streams = [await it.begin(seed) for seed in range(1, 5)]
        for name in ("w-1", "w-0"):
            api.change(f"{PODS}/{name}", lambda raw: raw["metadata"].update(deletionTimestamp=now(30)))
            await until(lambda: not it.ready(name))  # noqa: B023
            assert it.gateway.ready()
            # Its grace is short: what it has goes on elsewhere.
            it.workers[name].hang_up()
            api.remove(f"{PODS}/{name}")
            await until(lambda: name not in it.names())  # noqa: B023
            await it.add(name)
        for seed, stream in enumerate(streams, 1):
            assert exact(await stream, seed)
        assert it.gateway.metric("strikes_total") == 0


async def test_hundreds_of_pods_that_come_and_go(api: FakeApi) -> None:
    async with fleet(api) as it:
        await it.add("w-0")
        stream = await it.begin()
        for number in range(300):
            api.put(PODS, pod(f"x-{number}", "127.0.0.1", port=20_000 + number, phase="Pending"))
        await until(lambda: len(it.names()) == 301)
        for number in range(300):
            api.remove(f"{PODS}/x-{number}")
        await until(lambda: it.names() == {"w-0"})
        assert exact(await stream)
        assert it.gateway.metric("workers", state="UNREACHABLE") == 0
        await until(lambda: len(it.gateway._roster._tasks) == 1)
        series = [one for metric in it.gateway.registry.collect() for one in metric.samples]
        assert not any("x-" in one.labels.get("worker", "") for one in series)


async def test_staleness_is_a_metric(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Gateway(DispatcherOptions())
    assert built.metric("discovery_synced") == 1
    assert built.metric("discovery_age_seconds") == 0
    monkeypatch.setattr("moebius_gateway.workers.discovery.connect", api.client)
    api.faults.refuse = 403
    discovery = discover(DiscoveryOptions("app=worker", "default"), built.set_workers, built._metrics)
    discovery.start()
    try:
        await until(lambda: api.asked)
        assert built.metric("discovery_synced") == 0
        await until(lambda: built.metric("discovery_age_seconds") > 0.2)
        answers_since = time.monotonic()
        api.faults.refuse = None
        await until(lambda: built.metric("discovery_synced") == 1)
        assert built.metric("discovery_age_seconds") <= time.monotonic() - answers_since
        assert {one.query.get("labelSelector") for one in api.asked} == {"app=worker"}
    finally:
        discovery.stop()
