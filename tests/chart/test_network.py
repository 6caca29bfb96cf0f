"""Who may speak to whom: a small model of what a cluster makes of the policies."""

from typing import Any

import pytest

from tests.chart.matrix import HUB
from tests.chart.rendering import Object, container, matches, merged, of_kind, render, workloads

PEERS = ("gateway", "worker", "controller", "client", "prometheus", "api-server", "dns", "hub")
# What is needed, and on which port.
NEEDED = {
    ("client", "gateway", 8000),
    ("prometheus", "gateway", 8001),
    ("prometheus", "worker", 9401),
    ("prometheus", "controller", 9402),
    ("gateway", "worker", 7601),
    ("controller", "worker", 7601),
    ("gateway", "api-server", 6443),
    ("controller", "api-server", 6443),
    ("worker", "hub", 443),
    *((name, "dns", 53) for name in ("gateway", "worker", "controller")),
}
ADDRESSES = {"api-server": "192.0.2.1/32", "hub": "198.51.100.1/32"}
PORTS = {"gateway": (8000, 8001), "worker": (7601, 9401), "controller": (9402,)}


class Cluster:
    """Pods and policies of a release in namespace `llm`."""

    def __init__(self, objects: list[Object]) -> None:
        self.pods = {
            one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one
            for one in workloads(objects)
        }
        self.policies = of_kind(objects, "NetworkPolicy")

    def allows(self, source: str, target: str, port: int) -> bool:
        return self._one_way("Egress", source, target, port) and self._one_way(
            "Ingress", target, source, port
        )

    def _one_way(self, direction: str, pod: str, peer: str, port: int) -> bool:
        if pod not in self.pods:
            return True
        policies = [
            one["spec"]
            for one in self.policies
            if matches(one["spec"]["podSelector"], self._labels(pod))
            and direction in one["spec"]["policyTypes"]
        ]
        rules = [rule for one in policies for rule in one.get(direction.lower(), ())]
        served = pod if direction == "Ingress" else peer
        return not policies or any(self._admits(rule, direction, peer, served, port) for rule in rules)

    def _admits(self, rule: Any, direction: str, peer: str, served: str, port: int) -> bool:
        peers = rule.get("from" if direction == "Ingress" else "to")
        ports = rule.get("ports")
        return (peers is None or any(self._is(peer, one) for one in peers)) and (
            ports is None or any(self._number(served, one["port"]) == port for one in ports)
        )

    def _is(self, peer: str, one: Any) -> bool:
        if "ipBlock" in one:
            return ADDRESSES.get(peer) == one["ipBlock"]["cidr"]
        if "namespaceSelector" in one:
            return peer == "prometheus"
        return peer in self.pods and matches(one["podSelector"], self._labels(peer))

    def _labels(self, pod: str) -> dict[str, str]:
        labels = self.pods[pod]["spec"]["template"]["metadata"]["labels"]
        assert isinstance(labels, dict)
        return labels

    def _number(self, served: str, port: int | str) -> int:
        if isinstance(port, int):
            return port
        (number,) = (
            one["containerPort"] for one in container(self.pods[served])["ports"] if one["name"] == port
        )
        return int(number)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    blocks = {
        "apiServer": {"cidr": ADDRESSES["api-server"]},
        "hub": {"cidr": ADDRESSES["hub"]},
    }
    return Cluster(render(merged(HUB, {"networkPolicy": blocks}), namespace="llm"))


def test_what_is_needed_is_allowed_and_nothing_else(cluster: Cluster) -> None:
    asked = {
        (source, target, port)
        for source in PEERS
        for target in PEERS
        if {source, target} & set(PORTS) and source != target
        for port in (*PORTS.get(target, ()), *(() if target in PORTS else (53, 443, 6443)))
    }
    allowed = {one for one in asked if cluster.allows(*one)}
    # Anybody in the cluster is a client; of a resolver's addresses, and of what else a service listens on at
    # the same addresses, a policy knows nothing.
    surplus = {
        one
        for one in allowed - NEEDED
        if one[2] != 53 and one[1:] != ("gateway", 8000) and one[1:] != ("api-server", 443)
    }
    assert allowed >= NEEDED
    assert not surplus


def test_clients_can_be_named() -> None:
    clients = [{"podSelector": {"matchLabels": {"app": "web"}}}]
    objects = render(merged(HUB, {"networkPolicy": {"clients": clients}}))
    (policy,) = (
        one for one in of_kind(objects, "NetworkPolicy") if one["metadata"]["name"] == "moebius-gateway"
    )
    admitted = policy["spec"]["ingress"][0]["from"]
    # And `helm test`.
    (test,) = (one["metadata"]["labels"] for one in of_kind(objects, "Pod"))
    assert admitted[: len(clients)] == clients
    assert [matches(one["podSelector"], test) for one in admitted] == [False, True]
