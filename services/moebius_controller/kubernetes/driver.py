"""Workers as pods."""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import structlog
from kubernetes import client

from moebius_cluster.api import connect, own_namespace
from moebius_cluster.failures import FAILURES, reason_of
from moebius_cluster.pods import Pod, pod_of
from moebius_cluster.reflector import Reflector
from moebius_controller.kubernetes.actions import Actions
from moebius_controller.kubernetes.lease import Lease
from moebius_controller.kubernetes.memory import ConfigMapMemory
from moebius_controller.kubernetes.nodes import Node, node_of
from moebius_controller.kubernetes.observe import PORT, observe, run_of, runs, worker_of
from moebius_controller.kubernetes.pulses import Patient, Pulses
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.settings import ControllerSettings
from moebius_controller.state_file import ProcessView
from moebius_controller.types import Action, MarkNode
from moebius_controller.view import View

# Seconds: short, so that a watch which is lost in silence is found out before what is seen is too old to act
# on.
WATCH_TIMEOUT, SILENCE_TIMEOUT = 20.0, 30.0
# Changes within so many seconds are looked at together.
GATHER = 0.1
# Calls of the API that are under way at the same time.
CALLS = 8

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the pods are. `actions` is apart, so that its calls never wait for a connection that watches."""

    watching: client.ApiClient
    acting: client.ApiClient
    namespace: str


def open_cluster(settings: ControllerSettings) -> Cluster:
    """Asks nothing yet. Raises ClusterError."""
    return Cluster(connect(), connect(), settings.namespace or own_namespace())


class PodDriver:
    """The driver that `Controller` runs with on a cluster: `async with`."""

    def __init__(self, cluster: Cluster, settings: ControllerSettings, metrics: ControllerMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pulses = Pulses(settings.worker_tls)
        self._executor = ThreadPoolExecutor(CALLS, "api")
        self._telling: set[asyncio.Future[None]] = set()
        core = client.CoreV1Api(cluster.watching)
        self._pods: Reflector[Pod] = Reflector(
            partial(core.list_namespaced_pod, cluster.namespace, label_selector=settings.selector),
            pod_of,
            on_change=self._wake_from_thread,
            watch_timeout=WATCH_TIMEOUT,
            silence_timeout=SILENCE_TIMEOUT,
        )
        self._nodes: Reflector[Node] | None = None
        if settings.watch_nodes:
            self._nodes = Reflector(
                core.list_node,
                lambda raw: node_of(raw, settings.node_fault_conditions),
                on_change=self._wake_from_thread,
                watch_timeout=WATCH_TIMEOUT,
                silence_timeout=SILENCE_TIMEOUT,
            )
        self._actions = Actions(cluster.acting, cluster.namespace, settings.cordon)
        self._lease = Lease(
            cluster.acting,
            cluster.namespace,
            settings.lease_name,
            settings.identity,
            settings.lease_duration,
            self._wake_from_thread,
        )
        self.memory = ConfigMapMemory(
            cluster.acting, cluster.namespace, settings.state_configmap, self._executor
        )

    async def __aenter__(self) -> "PodDriver":
        for reflector in (self._pods, self._nodes):
            if reflector is not None:
                reflector.start()
        self._lease.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for reflector in (self._pods, self._nodes):
            if reflector is not None:
                reflector.stop()
        await asyncio.to_thread(self._lease.stop)
        await self._pulses.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def synced(self) -> bool:
        """Whether the pods are known; any thread may ask."""
        return self._pods.synced

    def view(self) -> View:
        pods = list(self._pods.objects().values())
        nodes = self._nodes_by_name()
        answers = self._pulses.answers(_patients(pods))
        self._measure()
        marked = None if nodes is None else frozenset(node.name for node in nodes.values() if node.marked)
        return View(observe(pods, nodes, answers, time.time()), marked, self._hands_off(), self._lease.term)

    def processes(self) -> Mapping[str, ProcessView]:
        """None: the API has them."""
        return {}

    async def perform(self, action: Action) -> bool:
        pod = max(
            (pod for pod in self._pods.objects().values() if pod.name == action.worker),
            key=lambda pod: pod.created_at,
            default=None,
        )
        if pod is None or run_of(pod) != action.run:
            return False
        node = (self._nodes_by_name() or {}).get(action.node) if isinstance(action, MarkNode) else None

        def act() -> bool:
            # Of many actions, this one may have waited for its turn for long.
            if self._lease.leading:
                self._actions.carry_out(action, pod, node)
                return True
            return False

        try:
            if not await self._loop.run_in_executor(self._executor, act):
                return False
        except FAILURES as error:
            call = type(action).__name__
            if isinstance(error, client.ApiException) and error.status in (404, 409):
                log.info("it is another one by now", worker=action.worker, action=call)
            else:
                self._metrics.api_errors.labels(call).inc()
                log.warning("an action failed", worker=action.worker, action=call, why=reason_of(error))
            return False
        telling = asyncio.ensure_future(self._tell(action, pod, node))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        return True

    def wake(self) -> None:
        """Ends a `changed` that is awaited."""
        self._changed.set()

    async def changed(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
        await asyncio.sleep(GATHER)
        self._changed.clear()

    def _wake_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def _nodes_by_name(self) -> Mapping[str, Node] | None:
        """None while they are not known, or known no more."""
        nodes = self._nodes
        if nodes is None or not nodes.synced or nodes.age() > self._settings.max_api_age:
            return None
        return {node.name: node for node in nodes.objects().values()}

    def _hands_off(self) -> str:
        if not self._pods.synced:
            return "the pods are not known yet"
        if self._pods.age() > self._settings.max_api_age:
            return f"nothing was heard of the API server for {self._pods.age():.0f} s"
        return "" if self._lease.leading else "another controller leads"

    def _measure(self) -> None:
        self._metrics.leads(self._lease.leading)
        for kind, reflector in (("pods", self._pods), ("nodes", self._nodes)):
            if reflector is not None:
                self._metrics.discovery_age.labels(kind).set(reflector.age())
                self._metrics.discovery_synced.labels(kind).set(reflector.synced)

    async def _tell(self, action: Action, pod: Pod, node: Node | None) -> None:
        """People who look at the pod see why; nothing depends on it."""
        try:
            await self._loop.run_in_executor(self._executor, self._actions.tell, action, pod, node)
        except FAILURES as error:
            self._metrics.api_errors.labels("Event").inc()
            log.info("an event is not told", worker=action.worker, why=reason_of(error))


def _patients(pods: list[Pod]) -> frozenset[Patient]:
    found = set()
    for pod in pods:
        address = pod.address(PORT)
        if address is not None and runs(pod):
            found.add(Patient(pod.uid, worker_of(pod).restart_count, address))
    return frozenset(found)
