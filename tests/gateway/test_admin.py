"""The listener for those who run the gateway."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from moebius_gateway.api.admin import build_admin_app
from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, running_gateway, until_ready
from tests.waiting import until


@asynccontextmanager
async def administered() -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    async with running_gateway(ScriptedBackend()) as gateway:
        await until_ready(gateway)
        transport = httpx.ASGITransport(build_admin_app(gateway.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            yield gateway, admin


async def test_the_public_one_has_probes_only() -> None:
    async with administered() as (gateway, admin), gateway.client() as client:
        for path in ("/livez", "/healthz", "/readyz", "/health"):
            assert (await client.get(path)).status_code == (await admin.get(path)).status_code == 200
        for path in ("/metrics", "/debug/workers", "/debug/admission", "/debug/clients", "/debug/tasks"):
            assert (await admin.get(path)).status_code == 200
            assert (await client.get(path)).status_code == 404
        assert (await client.post("/drain")).status_code == 404


async def test_what_is_told() -> None:
    async with administered() as (gateway, admin), gateway.client() as client:
        await client.post("/v1/completions", json={"model": MODEL.id, "prompt": [5]})
        assert "moebius_gateway_requests_total" in (await admin.get("/metrics")).text
        [worker] = (await admin.get("/debug/workers")).json()
        assert (worker["address"], worker["state"]) == ("127.0.0.1:1", "READY")
        line = (await admin.get("/debug/admission")).json()[MODEL.id]
        assert (line["running"], line["waiting"]) == (0, [])
        # What loads models is one of the tasks.
        tasks = (await admin.get("/debug/tasks")).text
        assert re.search(r"^\S+ \S+/text/registry\.py:\d+$", tasks, re.MULTILINE)


async def test_what_is_no_time_to_drain_is_refused_and_drains_nothing() -> None:
    async with administered() as (gateway, admin):
        for timeout in ("soon", "", "nan", "inf", "-1", "1e999"):
            answer = await admin.post("/drain", params={"timeout": timeout})
            assert answer.status_code == 400
            assert "seconds" in answer.json()["error"]
        assert not gateway.lifecycle.draining


async def test_draining_lets_requests_finish_and_takes_no_more() -> None:
    async with administered() as (gateway, admin), gateway.client() as client:
        may_end = asyncio.Event()
        gateway.backend.script = lambda _: [may_end, *gateway.backend.say("Hello")]
        body = {"model": MODEL.id, "prompt": [5]}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: gateway.backend.running)
        assert (await admin.post("/drain")).json() == {"in_flight": 1}
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        assert (await client.post("/v1/completions", json=body)).json()["error"]["code"] == "draining"
        draining = asyncio.create_task(admin.post("/drain?timeout=10"))
        await asyncio.sleep(0.05)
        assert not draining.done()
        may_end.set()
        assert (await running).status_code == 200
        assert (await draining).json() == {"in_flight": 0}
