"""A release of the chart, with two workers of a tiny random model."""

import os
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import CHART, merged
from tests.cluster.cluster import NAMESPACE, helm
from tests.cluster.images import TAG
from tests.faults.load import KILLING_TOKEN_ID
from tests.tiny import write_checkpoint

RELEASE = "tiny"
FULLNAME = "tiny-moebius"
MODEL = "tiny"
# Seconds without a step after which a front calls its engine stalled.
STALL_TIMEOUT = 5.0


def url() -> str:
    return os.environ.get("MOEBIUS_TEST_URL") or f"http://{FULLNAME}-gateway.{NAMESPACE}.svc.cluster.local"


def values() -> dict[str, Any]:
    """What the tests need, and where images and model are."""
    small = {"requests": {"cpu": "20m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
    own: dict[str, Any] = {
        "gateway": {
            "replicas": 2,
            "resources": small,
            "preStopSeconds": 3,
            "settings": {"drain_grace": 60},
        },
        "controller": {"resources": small},
        "worker": {
            "gpu": {"count": 0},
            "resources": {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
            "pdb": {"maxUnavailable": 1},
        },
        "models": {
            MODEL: {
                "replicas": 2,
                "servedModelName": MODEL,
                "settings": {
                    "threads": 1,
                    "kv_cache_memory": "64MiB",
                    "stall_timeout": STALL_TIMEOUT,
                    "inject_faults": [{"token_id": KILLING_TOKEN_ID, "action": "kill"}],
                },
            }
        },
    }
    return merged(own, _place())


def _place() -> dict[str, Any]:
    if given := os.environ.get("MOEBIUS_TEST_VALUES"):
        loaded = yaml.safe_load(Path(given).read_text())
        assert isinstance(loaded, dict)
        return loaded
    path = Path(os.environ["MOEBIUS_TEST_MODEL"]) / "tiny-mixtral"
    if not path.exists():
        write_checkpoint(path, "mixtral", num_hidden_layers=6)
        for file in path.iterdir():
            file.chmod(0o644)  # containers read it, as another user
    return {
        "gateway": {"image": {"tag": TAG}},
        "controller": {"image": {"tag": TAG}},
        "worker": {"image": {"tag": f"{TAG}-cpu"}},
        "models": {MODEL: {"source": {"hostPath": {"path": str(path)}}}},
    }


def workers(count: int) -> dict[str, Any]:
    return {"models": {MODEL: {"replicas": count}}}


def install(more: dict[str, Any] | None = None, *, timeout: str = "180s") -> None:
    helm(
        *("upgrade", "--install", "--create-namespace", RELEASE, str(CHART), "--wait", "--timeout", timeout),
        values=merged(values(), more or {}),
    )


def uninstall() -> None:
    helm("uninstall", RELEASE, "--wait", "--timeout", "180s", "--ignore-not-found")
