"""What every service tells of itself, and in which format."""

import httpx
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from moebius_common.build_info import metrics_app, tell_build

# Prometheus 2 asks so, Prometheus 3 with an escaping.
ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;version=0.0.4;q=0.5",
    "text/plain",
    "",
)


def test_names_keep_their_colons_whatever_is_asked_for() -> None:
    registry = CollectorRegistry()
    Counter("vllm:tokens", "Tokens", registry=registry).inc(3)

    transport = httpx.WSGITransport(metrics_app(registry))
    with httpx.Client(transport=transport, base_url="http://w") as client:
        for accept in ACCEPTS:
            text = client.get("/metrics", headers={"Accept": accept}).text
            assert "vllm:tokens_total 3.0" in text.splitlines(), accept


def test_build_and_process_are_told_and_no_times_of_creation() -> None:
    registry = CollectorRegistry()
    tell_build("worker", registry)
    Counter("x", "X", registry=registry).inc()
    transport = httpx.WSGITransport(metrics_app(registry))
    with httpx.Client(transport=transport, base_url="http://w") as client:
        families = {family.name: family for family in text_string_to_metric_families(client.get("/").text)}
    [build] = families["moebius_worker_build_info"].samples
    assert build.value == 1
    assert set(build.labels) == {"version", "python"}
    assert "process_resident_memory_bytes" in families
    assert not [name for name in families if name.endswith("_created")]
