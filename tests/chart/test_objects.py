"""The chart renders over a matrix of values; what it renders is valid, and its parts fit together."""

import re
from collections import Counter

import kubernetes_validate
import pytest

from tests.chart.matrix import EVERYTHING, HUB, LONG, MATRIX
from tests.chart.rendering import (
    ROOT,
    SIMULATED,
    Object,
    Values,
    container,
    flag,
    matches,
    merged,
    of_kind,
    render,
    the,
    workloads,
)

# Their schemas are not Kubernetes' own.
CUSTOM = ("HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor")
# As those of Services have to be, which is the narrowest.
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
matrix = pytest.mark.parametrize(
    ("values", "release"), [case[1:] for case in MATRIX], ids=[case[0] for case in MATRIX]
)


@matrix
def test_what_is_rendered_is_valid(values: Values, release: str) -> None:
    validate(values, release, "1.34")


@pytest.mark.parametrize("kube", ["1.31", "1.37"])
def test_everything_is_valid_in_other_versions(kube: str) -> None:
    values = merged(EVERYTHING)
    if kube == "1.31":  # has no image volumes
        values["models"] = {name: one for name, one in values["models"].items() if name != "image"}
    validate(values, "prod", kube)


def validate(values: Values, release: str, kube: str) -> None:
    for one in render(values, release=release, kube=f"{kube}.0"):
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, kube, strict=True)


@matrix
def test_names_and_labels_are_allowed_and_unique(values: Values, release: str) -> None:
    objects = render(values, release=release)
    named = Counter((one["kind"], one["metadata"]["name"]) for one in objects)
    assert set(named.values()) == {1}
    for one in objects:
        name = one["metadata"]["name"]
        assert len(name) <= 63, name
        assert NAME.fullmatch(name), name
        for value in one["metadata"].get("labels", {}).values():
            assert len(value) <= 63
            assert LABEL.fullmatch(value), value
    for one in of_kind(objects, "StatefulSet"):
        # Pods carry NAME-HASH, of at most 63 characters, as a label.
        assert len(one["metadata"]["name"]) <= 52


@matrix
def test_selectors_find_their_pods_and_hold_nothing_that_an_upgrade_changes(
    values: Values, release: str
) -> None:
    objects = render(values, release=release)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(objects)]
    for one in workloads(objects):
        selector = one["spec"]["selector"]
        found = [labels for labels in pods if matches(selector, labels)]
        assert found == [one["spec"]["template"]["metadata"]["labels"]]
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & set(selector["matchLabels"])
    for one in of_kind(objects, "Service"):
        assert any(matches({"matchLabels": one["spec"]["selector"]}, labels) for labels in pods)
        assert all(port["protocol"] == "TCP" for port in one["spec"]["ports"])
    for one in of_kind(objects, "PodDisruptionBudget"):
        assert any(matches(one["spec"]["selector"], labels) for labels in pods)
        assert one["spec"]["maxUnavailable"] == 1


@matrix
def test_programs_find_what_they_are_told_of(values: Values, release: str) -> None:
    """Config maps, volumes, accounts: what is referred to in the release is there."""
    objects = render(values, release=release)
    maps = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
    services = {one["metadata"]["name"] for one in of_kind(objects, "Service")}
    accounts = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")} | {"default", "own"}
    for one in workloads(objects):
        pod = one["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        mounts = {mount["name"] for mount in container(one)["volumeMounts"]}
        assert mounts <= volumes
        settings = next(volume for volume in pod["volumes"] if volume["name"] == "settings")
        assert settings["configMap"]["name"] in maps
        assert pod["serviceAccountName"] in accounts
        if one["kind"] == "StatefulSet":
            assert one["spec"]["serviceName"] in services


def test_two_releases_share_no_object() -> None:
    namespaced = [
        {(one["kind"], one["metadata"]["name"]) for one in render(EVERYTHING, release=release)}
        for release in ("one", "two")
    ]
    assert not namespaced[0] & namespaced[1]


def test_two_releases_with_long_names_share_no_object() -> None:
    releases = [LONG[:52] + end for end in "ab"]
    one, two = (
        {(one["kind"], one["metadata"]["name"]) for one in render(SIMULATED, release=name)}
        for name in releases
    )
    assert not one & two


def test_releases_of_two_namespaces_share_nothing_of_the_cluster() -> None:
    one, two = (
        {
            item["metadata"]["name"]
            for item in render(HUB, namespace=name)
            if item["kind"].startswith("ClusterRole")
        }
        for name in ("a", "b")
    )
    assert one
    assert not one & two


def test_monitors_scrape_ports_that_exist() -> None:
    objects = render(EVERYTHING)
    (service_monitor,) = of_kind(objects, "ServiceMonitor")
    services = [
        one
        for one in of_kind(objects, "Service")
        if matches(service_monitor["spec"]["selector"], one["metadata"]["labels"])
    ]
    (service,) = services
    (endpoint,) = service_monitor["spec"]["endpoints"]
    (port,) = (port for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
    gateway = the(objects, "Deployment", "moebius-gateway")
    assert port["targetPort"] in _ports(gateway)
    assert flag(gateway, "admin-listen") == f"0.0.0.0:{_ports(gateway)[port['targetPort']]}"

    (pod_monitor,) = of_kind(objects, "PodMonitor")
    scraped = [
        one
        for one in workloads(objects)
        if matches(pod_monitor["spec"]["selector"], one["spec"]["template"]["metadata"]["labels"])
    ]
    assert len(scraped) == len(EVERYTHING["models"]) + 1
    (endpoint,) = pod_monitor["spec"]["podMetricsEndpoints"]
    for one in scraped:
        assert flag(one, "metrics-listen") == f"0.0.0.0:{_ports(one)[endpoint['port']]}"


def _ports(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def test_gateway_and_controller_look_for_the_workers_of_this_release() -> None:
    objects = render(EVERYTHING, release="prod", namespace="llm")
    for name, option in (("gateway", "discover-selector"), ("controller", "selector")):
        selector = flag(the(objects, "Deployment", f"prod-moebius-{name}"), option)
        assert selector is not None
        wanted = {"matchLabels": dict(part.split("=") for part in selector.split(","))}
        found = [
            one
            for one in workloads(objects)
            if matches(wanted, one["spec"]["template"]["metadata"]["labels"])
        ]
        assert [one["kind"] for one in found] == ["StatefulSet"] * len(EVERYTHING["models"])


@pytest.mark.parametrize(
    ("kube", "budget", "scaler"),
    [("1.20.2", "policy/v1beta1", "autoscaling/v2beta2"), ("1.25.0", "policy/v1", "autoscaling/v2")],
)
def test_kinds_that_moved_are_asked_for_where_they_are(kube: str, budget: str, scaler: str) -> None:
    objects = render(merged(HUB, {"gateway": {"autoscaling": {"enabled": True}}}), kube=kube)
    assert {one["apiVersion"] for one in of_kind(objects, "PodDisruptionBudget")} == {budget}
    assert {one["apiVersion"] for one in of_kind(objects, "HorizontalPodAutoscaler")} == {scaler}


def test_alerts_lead_to_where_their_page_is_kept() -> None:
    page = "https://wiki.example.com/moebius"
    values = merged(SIMULATED, {"prometheusRule": {"enabled": True, "runbook": page}})
    (rule,) = of_kind(render(values), "PrometheusRule")
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert alerts
    assert all(one["annotations"]["runbook_url"].startswith(page + "#") for one in alerts)


VERBS = {
    "list": {"list", "watch"},
    "read": {"get"},
    "create": {"create"},
    "replace": {"update"},
    "patch": {"patch"},
    "delete": {"delete"},
}
CALL = re.compile(r"\.(list|read|create|replace|patch|delete)_(?:namespaced_)?(?!task)(\w+)\b")


def calls(*sources: str) -> set[tuple[str, str]]:
    """(resource, verb) of what the code asks of the API, by the names of the client's methods."""
    found = set()
    for source in sources:
        for path in (ROOT / "services").glob(source):
            for verb, kind in CALL.findall(path.read_text()):
                found |= {(f"{kind.replace('_', '')}s", one) for one in VERBS[verb]}
    return found


@pytest.mark.parametrize(
    ("account", "sources"),
    [
        ("gateway", ("moebius_gateway/workers/discovery.py",)),
        ("controller", ("moebius_controller/kubernetes/*.py",)),
    ],
)
def test_accounts_may_do_what_their_program_does_and_nothing_else(
    account: str, sources: tuple[str, ...]
) -> None:
    objects = render(SIMULATED, namespace="llm")
    bindings = [
        one
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for one in of_kind(objects, kind)
        if [subject["name"] for subject in one["subjects"]] == [f"moebius-{account}"]
    ]
    allowed = {
        (resource, verb)
        for binding in bindings
        for rule in the(objects, binding["roleRef"]["kind"], binding["roleRef"]["name"])["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = calls(*sources)
    assert asked
    assert allowed == asked


def test_what_the_controller_writes_goes_with_the_release() -> None:
    objects = render(SIMULATED)
    controller = the(objects, "Deployment", "moebius-controller")
    for kind, option in (("Lease", "lease-name"), ("ConfigMap", "state-configmap")):
        name = flag(controller, option)
        assert name is not None
        assert "data" not in the(objects, kind, name)
        rules = the(objects, "Role", "moebius-controller")["rules"]
        assert [name] in [rule.get("resourceNames") for rule in rules]


def test_keda_counts_what_waits_for_its_own_model() -> None:
    sources = {
        "hub": {"source": {"huggingFace": {"id": "Qwen/Qwen3-30B-A3B"}}},
        "file": {"source": {"huggingFace": {"id": "o/r/Some-Q4_K_M-00001-of-00002.gguf"}}},
        "claim": {"source": {"persistentVolumeClaim": {"claimName": "weights"}}},
        "named": {"source": {"hostPath": {"path": "/models/a.gguf"}}, "servedModelName": "a b"},
        "simulated": {"settings": {"engine": "sim"}},
    }
    expected = {
        "hub": "Qwen/Qwen3-30B-A3B",
        "file": "Some-Q4_K_M",
        "claim": "claim",
        "named": "a b",
        "simulated": "sim",
    }
    objects = render({"worker": {"keda": {"enabled": True}}, "models": sources})
    for name, served in expected.items():
        assert flag(the(objects, "StatefulSet", f"moebius-{name}"), "served-model-name") == served
        (trigger,) = the(objects, "ScaledObject", f"moebius-{name}")["spec"]["triggers"]
        assert f'model="{served}"' in trigger["metadata"]["query"]
        assert f'pod=~"moebius-{name}-[0-9]+"' in trigger["metadata"]["query"]
