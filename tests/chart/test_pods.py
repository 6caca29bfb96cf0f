"""Probes, times, GPUs, security: what the pods are like."""

import tomllib
from typing import Any

import pytest

from moebius_gateway.server import CLOSE_SECONDS
from moebius_gateway.settings import GatewaySettings
from moebius_worker.front.server import HEALTH_SERVICES, LIVENESS_SERVICE
from moebius_worker.settings import WorkerSettings
from tests.chart.matrix import EVERYTHING, HUB, MATRIX
from tests.chart.rendering import (
    SIMULATED,
    Object,
    RefusedError,
    container,
    flag,
    merged,
    of_kind,
    render,
    the,
    workloads,
)

OLD, NEW = "1.20.2", "1.37.0"


def settings_of(objects: list[Object], name: str) -> dict[str, Any]:
    return tomllib.loads(the(objects, "ConfigMap", name)["data"]["settings.toml"])


def worker(**values: Any) -> Object:
    (only,) = of_kind(render(merged(HUB, {"worker": values})), "StatefulSet")
    return only


@pytest.mark.parametrize("kube", [OLD, NEW])
def test_liveness_is_never_what_readiness_is(kube: str) -> None:
    for one in workloads(render(SIMULATED, kube=kube)):
        probes = container(one)
        live, ready, start = (
            probes[f"{kind}Probe"].get("httpGet") or probes[f"{kind}Probe"]["grpc"]
            for kind in ("liveness", "readiness", "startup")
        )
        assert live != ready
        # A model that loads is never killed for it.
        assert start == live
        assert probes["livenessProbe"]["failureThreshold"] >= 3
        assert probes["readinessProbe"]["failureThreshold"] >= 3


def test_workers_are_probed_by_grpc_where_the_version_has_it() -> None:
    (new,) = of_kind(render(SIMULATED, kube="1.24.0"), "StatefulSet")
    (old,) = of_kind(render(SIMULATED, kube="1.23.0"), "StatefulSet")
    assert container(new)["livenessProbe"]["grpc"] == {"port": 7601, "service": LIVENESS_SERVICE}
    assert container(new)["readinessProbe"]["grpc"]["service"] in HEALTH_SERVICES
    assert container(old)["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    assert container(old)["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_workers_with_tls_are_probed_by_http() -> None:
    tls = {"tls_cert": "/tls/tls.crt", "tls_key": "/tls/tls.key"}
    assert "httpGet" in container(worker(settings=tls))["livenessProbe"]


@pytest.mark.parametrize("budget", [60, 600, 3601.5])
def test_the_startup_budget_covers_the_load_budget(budget: float) -> None:
    probe = container(worker(settings={"load_stall_timeout": budget}))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= budget
    default = container(worker())["startupProbe"]
    assert (
        default["periodSeconds"] * default["failureThreshold"]
        >= WorkerSettings.model_fields["load_stall_timeout"].default
    )


@pytest.mark.parametrize("grace", [0, 30, 600])
def test_gateways_get_the_time_that_their_drain_takes(grace: int) -> None:
    values = merged(SIMULATED, {"gateway": {"settings": {"drain_grace": grace}, "preStopSeconds": 7}})
    objects = render(values)
    pod = the(objects, "Deployment", "moebius-gateway")["spec"]["template"]["spec"]
    assert settings_of(objects, "moebius-gateway")["drain_grace"] == grace
    assert pod["terminationGracePeriodSeconds"] > 7 + grace + CLOSE_SECONDS
    assert pod["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 7}}
    old = the(render(values, kube="1.29.0"), "Deployment", "moebius-gateway")
    assert container(old)["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "7"]}}


@pytest.mark.parametrize("timeout", [None, 0, 600])
def test_workers_get_the_time_that_their_drain_takes(timeout: int | None) -> None:
    pod = worker(settings={} if timeout is None else {"drain_timeout": timeout})["spec"]["template"]["spec"]
    default = WorkerSettings.model_fields["drain_timeout"].default
    assert pod["terminationGracePeriodSeconds"] > (default if timeout is None else timeout)


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"gateway": {"terminationGracePeriodSeconds": 60}}, "terminationGracePeriodSeconds is 60"),
        (
            {"worker": {"terminationGracePeriodSeconds": 10}},
            "models.demo: terminationGracePeriodSeconds is 10",
        ),
        ({"models": {"demo": {"settings": {"engine": "model"}}}}, "models.demo.source names 0 models"),
        (
            {
                "models": {
                    "demo": {"source": {"huggingFace": {"id": "a/b"}, "hostPath": {"path": "/models/c"}}}
                }
            },
            "models.demo.source names 2 models",
        ),
        ({"models": {"gateway": {"settings": {"engine": "sim"}}}}, "models.gateway: this name is taken"),
        ({"worker": {"cache": {"kind": "claim"}}}, "cache.claimName is needed"),
        ({"worker": {"cache": {"kind": "claimTemplate"}}}, "cache.size is needed"),
        ({"worker": {"cache": {"kind": "hostPath"}}}, "cache.hostPath is needed"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(values: dict[str, Any], hint: str) -> None:
    with pytest.raises(RefusedError, match=hint):
        render(merged(SIMULATED, values))


def test_without_models_helm_says_how_to_name_one() -> None:
    with pytest.raises(
        RefusedError, match=r"models is empty: .*--set models\.qwen3\.source\.huggingFace\.id"
    ):
        render({})


def test_image_volumes_need_a_version_that_has_them() -> None:
    image = {"models": {"a": {"source": {"image": {"reference": "r/a:1"}}}}}
    with pytest.raises(RefusedError, match=r"needs Kubernetes 1\.33"):
        render(image, kube="1.31.0")
    (stateful_set,) = of_kind(render(image), "StatefulSet")
    (volume,) = (one for one in stateful_set["spec"]["template"]["spec"]["volumes"] if one["name"] == "model")
    assert volume["image"]["reference"] == "r/a:1"


def test_a_rollout_of_workers_needs_no_spare_gpu() -> None:
    """A StatefulSet ends a pod before it makes its successor; a Deployment would have to be told."""
    for replicas in (1, 2):
        spec = worker(replicas=replicas)["spec"]
        assert spec["updateStrategy"] == {"type": "RollingUpdate"}
        assert spec["podManagementPolicy"] == "Parallel"


def test_gpus_and_images_follow_the_count() -> None:
    objects = {
        one["metadata"]["labels"]["moebius.dev/model"]: one
        for one in of_kind(render(EVERYTHING), "StatefulSet")
    }
    assert container(objects["hub"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container(objects["claim"])["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 8
    assert container(objects["hub"])["image"].endswith("/moebius/worker:0.1.0-cuda")
    assert container(objects["file"])["image"].endswith("/moebius/worker:0.1.0-cpu")
    assert "nvidia.com/gpu" not in container(objects["file"])["resources"]["limits"]
    assert flag(objects["file"], "device") == "cpu"


@pytest.mark.parametrize(
    ("name", "model", "served"),
    [
        ("hub", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("claim", "/model/deepseek/v3", "claim"),
        ("file", "/model/m.gguf", "file"),
        ("image", "/model/a", "image"),
        ("simulated", None, "sim"),
    ],
)
def test_sources_become_models(name: str, model: str | None, served: str) -> None:
    (one,) = (
        one
        for one in of_kind(render(EVERYTHING), "StatefulSet")
        if one["metadata"]["labels"]["moebius.dev/model"] == name
    )
    assert flag(one, "model") == model
    assert flag(one, "served-model-name") == served
    mounts = {mount["name"]: mount for mount in container(one)["volumeMounts"]}
    assert ("model" in mounts) == (model is not None and model.startswith("/model"))
    inits = [init["name"] for init in one["spec"]["template"]["spec"].get("initContainers", ())]
    assert ("download" in inits) == (name == "hub")


def test_nodes_with_a_faulty_gpu_are_left_out_whatever_else_is_wanted() -> None:
    fault = {"key": "moebius.dev/gpu-fault", "operator": "DoesNotExist"}
    for values in (HUB, EVERYTHING):
        for one in of_kind(render(values), "StatefulSet"):
            node = one["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
            terms = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            assert terms
            assert all(fault in term["matchExpressions"] for term in terms)


@pytest.mark.parametrize(
    ("values", "release"), [case[1:] for case in MATRIX], ids=[case[0] for case in MATRIX]
)
def test_pods_are_restricted(values: dict[str, Any], release: str) -> None:
    """The `restricted` level of Pod Security, as its page lists it; host paths only where a model asks."""
    for one in workloads(render(values, release=release)):
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for program in (
            container(one),
            *(i for i in pod.get("initContainers", ()) if i["name"] == "download"),
        ):
            context = program["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            if one["kind"] == "Deployment":
                assert context["readOnlyRootFilesystem"] is True
        if one["kind"] == "StatefulSet":
            assert pod["automountServiceAccountToken"] is False


def test_settings_come_as_they_were_written() -> None:
    written = {
        "max_running": 64,
        "stall_timeout": 7.5,
        "kv_cache_memory": "2GiB",
        "exclude_backends": ["experts:triton"],
        "inject_faults": [{"token_id": 3, "action": "kill"}],
        "sim": {"itl": 0.05, "kv_tokens": 1000000},
        "engine": "sim",
    }
    objects = render({"models": {"demo": {"settings": written}}})
    assert settings_of(objects, "moebius-demo") == written


def test_what_a_model_says_wins_over_what_holds_for_all() -> None:
    values = {
        "worker": {"settings": {"max_running": 8, "dtype": "float32"}, "replicas": 3},
        "models": {"a": {"settings": {"engine": "sim", "max_running": 9}, "replicas": 5}},
    }
    objects = render(values)
    assert settings_of(objects, "moebius-a") == {"engine": "sim", "max_running": 9, "dtype": "float32"}
    assert the(objects, "StatefulSet", "moebius-a")["spec"]["replicas"] == 5


def test_a_change_of_settings_rolls_the_pods() -> None:
    one, two = (worker(settings={"max_running": count}) for count in (8, 9))
    assert (
        one["spec"]["template"]["metadata"]["annotations"]
        != two["spec"]["template"]["metadata"]["annotations"]
    )


def test_the_gateways_drain_longer_than_by_default() -> None:
    grace = settings_of(render(SIMULATED), "moebius-gateway")["drain_grace"]
    assert grace >= GatewaySettings.model_fields["drain_grace"].default
