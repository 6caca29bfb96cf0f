"""What a cluster's probes ask of a worker, by HTTP and by gRPC."""

import json
from pathlib import Path

import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Gauge

from moebius_common.http_listener import serve_http
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front.server import LIVENESS_SERVICE
from tests.worker.front.worker_process import worker

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PATHS = ("/livez", "/readyz")
NAMES = (LIVENESS_SERVICE, "moebius.worker.v1.Worker")


async def test_a_worker_that_loads_is_alive_and_not_ready(tmp_path: Path) -> None:
    # It loads until it is told to do otherwise.
    annotations = tmp_path / "annotations"
    levels = [{"name": "quick", "settings": {"sim": {"start_seconds": 0.0}}}]
    flags = ("--engine", "sim", "--sim.start-seconds", "300", "--metrics-listen", "127.0.0.1:0")
    level = ("--fallback-levels", json.dumps(levels), "--level-file", str(annotations))
    async with worker("", tmp_path / "log", *flags, *level) as running, httpx.AsyncClient() as client:
        health = health_pb2_grpc.HealthStub(running.channel)

        async def probes() -> tuple[int, int, int, int]:
            by_http = [(await client.get(f"http://{running.metrics}{path}")).status_code for path in PATHS]
            by_grpc = [
                (await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in NAMES
            ]
            return by_http[0], by_http[1], by_grpc[0], by_grpc[1]

        assert await probes() == (200, 503, SERVING, NOT_SERVING)
        annotations.write_text('moebius.dev/fallback-level="1"\n')
        await running.in_state(pb.STATE_READY)
        assert await probes() == (200, 200, SERVING, SERVING)


async def test_probes_are_asked_each_time_and_metrics_are_beside_them() -> None:
    registry = CollectorRegistry()
    Gauge("answer", "A number.", registry=registry).set(42)
    well = {"now": True}
    port = serve_http("127.0.0.1:0", registry, {"/livez": lambda: well["now"]})
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/livez")).status_code == 200
        well["now"] = False
        assert (await client.get("/livez")).status_code == 503
        assert "answer 42.0" in (await client.get("/metrics")).text


async def test_addresses_of_both_families() -> None:
    for host in ("127.0.0.1", "[::1]"):
        port = serve_http(f"{host}:0", CollectorRegistry(), {"/livez": lambda: True})
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{host}:{port}/livez")).status_code == 200
