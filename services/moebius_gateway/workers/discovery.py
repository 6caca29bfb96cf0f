"""Workers that are found by watching a cluster's pods."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from kubernetes import client

from moebius_cluster.api import connect, own_namespace
from moebius_cluster.pods import Pod, pod_of
from moebius_cluster.reflector import Reflector
from moebius_gateway.workers.member import Member
from moebius_gateway.workers.metrics import DispatcherMetrics

log = structlog.get_logger(__name__)

# The name of a worker's port.
PORT = "grpc"
# Seconds for which changes are gathered: pods change many times while they start.
GATHERING = 0.05


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """`selector`: labels of the pods that are workers. `namespace`: None for the gateway's own."""

    selector: str
    namespace: str | None = None


def members_of(pods: Iterable[Pod]) -> list[Member]:
    """The workers among the pods: those that have an address and did not end.

    Of pods that share a name or an address, which they cannot at the same time, the newest is meant.
    """
    found: dict[str, Member] = {}
    for pod in sorted(pods, key=lambda pod: (pod.deletion is None, pod.created_at)):
        address = None if pod.over else pod.address(PORT)
        if address is not None:
            found[pod.name] = Member(address, pod.name, pod.uid, retiring=pod.deletion is not None)
    return list({member.address: member for member in found.values()}.values())


class Discovery:
    """Keeps `apply` told of the workers; it is called on the loop that this was started on.

    While the API server is away the last workers known stay.
    """

    def __init__(self, list_pods: Callable[..., Any], apply: Callable[[list[Member]], None]) -> None:
        """`list_pods`: as a reflector wants it."""
        self._apply = apply
        self._loop: asyncio.AbstractEventLoop
        self._gathering = False
        self.reflector = Reflector(list_pods, pod_of, on_change=self._changed)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reflector.start()

    def stop(self) -> None:
        self.reflector.stop()

    def _changed(self) -> None:
        """In the reflector's thread."""
        if not self._gathering:
            self._gathering = True
            self._loop.call_soon_threadsafe(self._loop.call_later, GATHERING, self._take)

    def _take(self) -> None:
        self._gathering = False
        pods = self.reflector.objects().values()
        members = members_of(pods)
        if not members:
            needed = f"an address and a port named {PORT}"
            log.warning("no pod is a worker", pods=len(pods), needed=needed)
        self._apply(members)


def discover(
    options: DiscoveryOptions, apply: Callable[[list[Member]], None], metrics: DispatcherMetrics
) -> Discovery:
    """Not started yet. Raises ClusterError when nothing says where the API server is."""
    core = client.CoreV1Api(connect())
    namespace = options.namespace or own_namespace()
    server = core.api_client.configuration.host
    log.info("workers are discovered", api_server=server, namespace=namespace, selector=options.selector)
    pods = partial(core.list_namespaced_pod, namespace, label_selector=options.selector)
    discovery = Discovery(pods, apply)
    metrics.discovery_synced.set_function(lambda: discovery.reflector.synced)
    metrics.discovery_age.set_function(discovery.reflector.age)
    return discovery
