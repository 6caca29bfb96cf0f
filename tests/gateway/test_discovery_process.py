"""The gateway's process on a cluster: an API server that is a fake, a worker that is a process."""

import json
from pathlib import Path

import pytest

from moebius_gateway.settings import GatewaySettings
from tests.cluster_fakes import PODS, FakeApi, pod
from tests.gateway.test_api_process import PLAIN, child, ready, serving, worker

SELECTOR = "app=worker"
SHORT = PLAIN | {"max_tokens": 4}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def point(kubeconfig: Path, api: FakeApi) -> None:
    content = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
    }
    kubeconfig.write_text(json.dumps(content))


async def test_it_serves_from_the_pods_that_it_finds(kubeconfig: Path, tmp_path: Path) -> None:
    with FakeApi() as api:
        point(kubeconfig, api)
        async with (
            worker(tmp_path / "tokenizer", 200) as (address, _),
            serving("--discover-selector", SELECTOR) as (client, log),
        ):
            assert (await client.get("/readyz")).status_code == 503
            api.put(PODS, pod("w-0", "127.0.0.1", port=int(address.rpartition(":")[2])))
            await ready(client, log)
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
            api.go()
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
            log.process.terminate()
            assert await log.process.wait() == 0


async def test_without_a_cluster_it_says_so_and_ends(kubeconfig: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--discover-selector", SELECTOR)
    async with child("moebius_gateway", *flags) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 1
        last = stderr.decode().strip().splitlines()[-1]
        assert last.startswith("moebius-gateway: the Kubernetes API cannot be reached")
        assert "KUBECONFIG" in last


def test_workers_are_named_or_found() -> None:
    with pytest.raises(ValueError, match="exclude one another"):
        GatewaySettings(workers=("w:1",), discover_selector=SELECTOR)
    with pytest.raises(ValueError, match="needs --discover-selector"):
        GatewaySettings(discover_namespace="models")
    with pytest.raises(ValueError, match="discover_selector"):
        GatewaySettings(discover_selector="")
