"""Which API server is meant, and what is said when none is."""

import json
from pathlib import Path

import pytest
from kubernetes import client

from moebius_cluster import api
from moebius_cluster.errors import ClusterError
from tests.cluster_fakes import PODS, FakeApi, pod


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def write(path: Path, server: str, **context: str) -> None:
    contexts = [{"name": "here", "context": {"cluster": "c", "user": "u", **context}}]
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": contexts,
    }
    path.write_text(json.dumps(content))


def test_the_kubeconfig_says_where_and_in_which_namespace(kubeconfig: Path) -> None:
    with FakeApi() as fake:
        fake.put(PODS, pod("a"))
        write(kubeconfig, f"http://127.0.0.1:{fake.port}", namespace="models")
        listed = client.CoreV1Api(api.connect()).list_namespaced_pod("default")
        assert [one.metadata.name for one in listed.items] == ["a"]
        assert api.own_namespace() == "models"
        write(kubeconfig, f"http://127.0.0.1:{fake.port}")
        assert api.own_namespace() == "default"


@pytest.mark.parametrize("content", [None, "", "{", "[]", "a: b", "\0", "current-context: x\ncontexts: []"])
def test_without_one_that_can_be_used_it_is_said_what_to_do(kubeconfig: Path, content: str | None) -> None:
    if content is not None:
        kubeconfig.write_text(content)
    with pytest.raises(ClusterError, match="KUBECONFIG"):
        api.connect()
    with pytest.raises(ClusterError, match="namespace"):
        api.own_namespace()


def test_in_a_pod_its_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    monkeypatch.delenv("KUBECONFIG", raising=False)
    for name, content in (("token", "secret"), ("ca.crt", "certificate"), ("namespace", "models\n")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(api, "_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(client, "ApiClient", lambda configuration: configuration)
    configuration = api.connect()
    assert configuration.host == "https://10.96.0.1:443"
    assert configuration.api_key["BearerToken"] == "bearer secret"
    assert configuration.retries is False
    assert api.own_namespace() == "models"


def test_an_api_server_that_is_not_there_fails_at_once(kubeconfig: Path) -> None:
    with FakeApi() as fake:
        write(kubeconfig, f"http://127.0.0.1:{fake.port}")
    with pytest.raises(Exception, match="refused"):
        client.CoreV1Api(api.connect()).list_namespaced_pod("default")
