"""What the HTTP side counts, and under which labels."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from moebius_gateway.api.admin import build_admin_app
from moebius_gateway.metrics import GENERATION_ROUTES
from moebius_gateway.plain_metrics import PlainHistogram
from moebius_gateway.types import Tokens
from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, running_gateway, until_ready

pytestmark = pytest.mark.asyncio(loop_scope="session")
PLAIN: dict[str, Any] = {"model": MODEL.id, "prompt": [5, 6, 7]}


@pytest_asyncio.fixture(loop_scope="session")
async def fresh() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedBackend()) as gateway:
        yield gateway


async def test_requests_by_route_code_and_stream(fresh: Gateway) -> None:
    async with fresh.client() as client:
        await client.post("/v1/completions", json=PLAIN)
        await client.post("/v1/completions", json=PLAIN | {"stream": True})
        await client.post("/v1/completions", json=PLAIN | {"n": 0})
        await client.get("/v1/models/some/unknown/name")
        await client.get("/v1/nonsense")
        await client.get("/livez")
    counted = "moebius_gateway_requests_total"
    assert fresh.metric(counted, route="/v1/completions", code="200", stream="false") == 1
    assert fresh.metric(counted, route="/v1/completions", code="200", stream="true") == 1
    assert fresh.metric(counted, route="/v1/completions", code="400", stream="false") == 1
    assert fresh.metric(counted, route="/v1/models/{model_id:path}", code="404") == 1
    assert fresh.metric(counted, route="other", code="404") == 1
    assert fresh.metric(counted, route="/livez", code="200") == 1
    assert fresh.metric("moebius_gateway_requests_in_flight") == 0


async def test_tokens_and_times(fresh: Gateway) -> None:
    said = fresh.backend.say("abcd")
    fresh.backend.script = lambda _: [Tokens(said[0].token_ids, cached_tokens=2), *said[1:]]
    async with fresh.client() as client:
        await client.post("/v1/completions", json=PLAIN | {"n": 2})
    assert fresh.metric("moebius_gateway_prompt_tokens_total", model=MODEL.id) == 3
    assert fresh.metric("moebius_gateway_prompt_tokens_cached_total", model=MODEL.id) == 2
    assert fresh.metric("moebius_gateway_generated_tokens_total", model=MODEL.id) == 10
    assert fresh.metric("moebius_gateway_time_to_first_token_seconds_count", model=MODEL.id) == 2
    assert fresh.metric("moebius_gateway_inter_token_latency_seconds_count", model=MODEL.id) == 8
    assert fresh.metric("moebius_gateway_request_seconds_count", model=MODEL.id, stream="false") == 1


async def test_buckets_hold_what_is_at_most_their_bound() -> None:
    registry = CollectorRegistry()
    histogram = PlainHistogram("seconds", "Some times", (0.1, 1), registry)
    for seconds in (0.05, 0.1, 0.3, 1, 7):
        histogram.of("m").observe(seconds)
    lines = generate_latest(registry).decode().splitlines()
    assert lines[1:] == [
        "# TYPE seconds histogram",
        'seconds_bucket{le="0.1",model="m"} 2.0',
        'seconds_bucket{le="1.0",model="m"} 4.0',
        'seconds_bucket{le="+Inf",model="m"} 5.0',
        'seconds_count{model="m"} 5.0',
        'seconds_sum{model="m"} 8.45',
    ]


async def test_what_only_moves_on_faults_is_there_from_the_start(fresh: Gateway) -> None:
    for code in ("200", "429", "500", "503"):
        assert fresh.metric("moebius_gateway_requests_total", route="/v1/chat/completions", code=code) == 0
    for code in ("engine_dead", "internal_error", "overloaded", "kv_exhausted", "poisoned"):
        assert fresh.metric("moebius_gateway_stream_errors_total", code=code) == 0


async def test_a_model_s_metrics_are_there_before_its_first_request(fresh: Gateway) -> None:
    await until_ready(fresh)
    transport = httpx.ASGITransport(build_admin_app(fresh.services))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        text = (await admin.get("/metrics")).text
    for line in (
        f'moebius_gateway_time_to_first_token_seconds_count{{model="{MODEL.id}"}} 0.0',
        f'moebius_gateway_request_seconds_count{{model="{MODEL.id}",stream="true"}} 0.0',
        f'moebius_gateway_generated_tokens_total{{model="{MODEL.id}"}} 0.0',
    ):
        assert line in text.splitlines()


async def test_routes_that_generate_are_those_that_there_are(fresh: Gateway) -> None:
    """The series that exist from the start are of routes that are served."""
    async with fresh.client() as client:
        for route in GENERATION_ROUTES:
            assert (await client.post(route, json={})).status_code == 400
            assert fresh.metric("moebius_gateway_requests_total", route=route, code="400") == 1


async def test_clients_make_no_labels(fresh: Gateway) -> None:
    async with fresh.client() as client:
        for name in ("evil-1", "evil-2"):
            await client.post("/v1/completions", json=PLAIN | {"model": name}, headers={"X-Request-Id": name})
            await client.get(f"/v1/models/{name}")
            await client.get(f"/{name}")
    text = generate_latest(fresh.registry).decode()
    assert "evil" not in text
    assert "moebius_gateway_requests_total" in text
