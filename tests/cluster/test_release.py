"""A release from its installation to its end, and workers that cannot serve."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from kubernetes import client

from tests.chart.rendering import merged
from tests.cluster import release
from tests.cluster.cluster import NAMESPACE, helm, run, until
from tests.cluster.conftest import STREAMS, Scenes
from tests.cluster.load import new_client
from tests.faults.load import KILLING_TOKEN_ID, Prompt, stream

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_helm_test_passes(scenes: Scenes) -> None:
    await scenes.with_workers()
    log = await asyncio.to_thread(helm, "test", release.RELEASE, "--logs", "--timeout", "120s")
    assert f"{release.MODEL}: " in log


@pytest.mark.timed
async def test_what_helm_prints_works(scenes: Scenes) -> None:
    """The notes' commands, as a person would type them."""
    await scenes.with_workers()
    notes = await asyncio.to_thread(helm, "get", "notes", release.RELEASE)
    asking = notes.partition("Ask it something:")[2].partition("Whether")[0]
    commands = [line.strip() for line in asking.splitlines() if line.startswith("  ")]
    (forward,) = (line for line in commands if "port-forward" in line)
    commands.insert(commands.index(forward) + 1, "sleep 3")
    # A random model would go on for long, and say the word that kills it.
    short = '\\"temperature\\": 0, \\"max_tokens\\": 16, '
    script = "\n".join(["trap 'kill %1' EXIT", *commands]).replace('-d "{', f'-d "{{{short}')
    answer = await asyncio.to_thread(run, "bash", "-c", script)
    assert "data: [DONE]" in answer, answer


async def test_an_upgrade_fails_no_stream(scenes: Scenes) -> None:
    """Every pod of gateways, controllers and workers is replaced."""
    cluster, load = scenes.cluster, await scenes.with_workers()

    def pods() -> set[str]:
        components = ("gateway", "controller", "worker")
        return {pod.uid for name in components for pod in cluster.pods(name) if not pod.ending}

    before = pods()
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(STREAMS, stop))
    changed = {
        "gateway": {"settings": {"max_waiting": 999}},
        "controller": {"settings": {"min_ready": 1}},
        "worker": {"settings": {"max_running": 16}},
    }
    started = time.monotonic()
    try:
        await until(lambda: load.chunks > 400, "streams run", 60)
        await asyncio.to_thread(release.install, merged(release.workers(2), changed))
    finally:
        seconds = time.monotonic() - started
        stop.set()
        await running
    scenes.report.add("upgrade of everything", rollout=seconds, streams=len(load.records))
    scenes.report.add("upgrade of everything", next_token=load.longest_gap(started))
    assert not load.failures()
    assert not before & pods()


async def test_poison_is_isolated(scenes: Scenes) -> None:
    load = await scenes.with_workers()
    stop = asyncio.Event()
    neighbours = asyncio.create_task(load.run(STREAMS, stop))
    try:
        await until(lambda: load.chunks > 200, "streams run", 60)
        async with new_client(load.url) as http:
            poisoned = await http.post(
                "/v1/completions", json=Prompt((20, 30, KILLING_TOKEN_ID, 40)).body(load.model)
            )
        assert poisoned.status_code == 500, poisoned.text
        assert poisoned.json()["error"]["code"] == "poisoned"
    finally:
        stop.set()
        await neighbours
    assert not load.failures()


async def test_a_model_with_a_bad_flag_falls_to_the_level_without_it_and_serves(scenes: Scenes) -> None:
    """More cache than any machine has; the level below is content with less."""
    cluster, load = scenes.cluster, await scenes.with_workers()
    bad = {
        "settings": {
            "kv_cache_memory": "64TiB",
            "fallback_levels": [{"name": "small-cache", "settings": {"kv_cache_memory": "64MiB"}}],
        },
        "servedModelName": "bad",
    }
    place = release.values()["models"][release.MODEL]
    started = time.monotonic()
    more = merged(release.workers(2), {"models": {"bad": merged(place, {"replicas": 1}, bad)}})
    await asyncio.to_thread(release.install, more, timeout="240s")
    seconds = time.monotonic() - started
    scenes.report.add("bad flag", serving=seconds)
    (pod,) = (one for one in cluster.pods("worker") if one.name.startswith(f"{release.FULLNAME}-bad"))
    told = cluster.core.read_namespaced_pod(pod.name, NAMESPACE).metadata.annotations
    assert told["moebius.dev/fallback-level"] == "1"
    assert cluster.metrics(pod.name, 9401)["moebius_worker_fallback_level"] == 1
    events = cluster.core.list_namespaced_event(
        NAMESPACE, field_selector=f"involvedObject.uid={pod.uid},type=Warning"
    )
    assert any(one.source.component == "moebius-controller" for one in events.items)
    async with new_client(load.url) as http:
        prompt, undisturbed = next(iter(load.undisturbed.items()))
        assert (await stream(http, prompt.body("bad"))).answer() == undisturbed.answer()
    await asyncio.to_thread(release.install, release.workers(2))


@pytest.fixture
def worker_of_fake_nodes() -> Iterator[None]:
    """The addresses of pods on a lab's fake nodes lead here."""
    flags = ("--engine", "sim", "--listen", "0.0.0.0:7601", "--served-model-name", "far")
    process = subprocess.Popen([sys.executable, "-m", "moebius_worker", *flags], stderr=subprocess.DEVNULL)
    yield
    process.terminate()
    process.wait()


async def test_a_worker_leaves_a_node_that_is_gone(scenes: Scenes, worker_of_fake_nodes: None) -> None:
    cluster = scenes.cluster
    await scenes.with_workers()
    nodes = [one.metadata.name for one in cluster.core.list_node(label_selector="kube-lab/node=fake").items]
    if not cluster.lab or len(nodes) < 2:
        pytest.skip("needs a lab with two fake nodes")
    lost = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 5,
        }
        for taint in ("not-ready", "unreachable")
    ]
    far = {
        "settings": {"engine": "sim", "drain_timeout": 0},
        "nodeSelector": {"kube-lab/node": "fake"},
        "tolerations": [{"key": "kube-lab/node", "operator": "Exists"}, *lost],
    }
    await asyncio.to_thread(release.install, merged(release.workers(2), {"models": {"far": far}}))

    def find() -> client.V1Pod | None:
        pods = [one for one in cluster.pods("worker") if one.name == f"{release.FULLNAME}-far-0"]
        return pods[0] if pods else None

    before = find()
    assert before is not None
    started = time.monotonic()
    await asyncio.to_thread(run, "kubectl", "label", "node", before.node, "kube-lab/lost=true")
    try:
        await until(
            lambda: (now := find()) and now.uid != before.uid and now.ready and now.node != before.node,
            "the worker is on another node",
            240,
            1.0,
        )
        scenes.report.add("node gone", elsewhere=time.monotonic() - started)
    finally:
        await asyncio.to_thread(run, "kubectl", "label", "node", before.node, "kube-lab/lost-")
    await asyncio.to_thread(release.install, release.workers(2))


async def test_nothing_is_left(scenes: Scenes) -> None:
    await scenes.with_workers()
    await asyncio.to_thread(release.uninstall)
    scenes.forget()
    kinds = (
        "all,configmaps,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies,leases,pvc"
    )
    label = ("--selector", f"app.kubernetes.io/instance={release.RELEASE}", "--output", "name")

    def gone() -> bool:
        return not run("kubectl", "--namespace", NAMESPACE, "get", kinds, *label).strip()

    await until(gone, "all objects of the release are gone", 120)
    names = run("kubectl", "--namespace", NAMESPACE, "get", "configmaps,leases,secrets", "--output", "name")
    assert release.FULLNAME not in names
    cluster_wide = run("kubectl", "get", "clusterroles,clusterrolebindings", *label)
    assert not cluster_wide.strip()
    in_default = run("kubectl", "--namespace", "default", "get", "roles,rolebindings", *label)
    assert not in_default.strip()
