"""What those who run the gateway ask of it, on a listener of its own: nothing here needs a key."""

import asyncio
import math
import time
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.health_routes import health_router
from moebius_gateway.api.services import Services


def build_admin_app(services: Services) -> FastAPI:
    app = FastAPI(title="Moebius: administration", openapi_url=None, redirect_slashes=False)
    app.include_router(health_router(services))

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        for model in services.backend.models():
            services.metrics.serves(model.id)
        return Response(generate_latest(services.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.post("/drain")
    async def drain(request: Request) -> Response:
        """No new requests; answers when those in flight are through, at the latest after `?timeout=` seconds.

        The process goes on: ending it is the caller's business.
        """
        timeout = _seconds(request.query_params.get("timeout", "0"))
        if timeout is None:
            return _json({"error": "timeout is a number of seconds, 0 or more"}, 400)
        left = await services.lifecycle.close(timeout)
        return _json({"in_flight": left})

    @app.get("/debug/workers")
    async def workers() -> Response:
        """Every worker as the gateway sees it."""
        now = time.monotonic()
        return _json([view._asdict() | {"now": now} for view in services.backend.workers()])

    @app.get("/debug/admission")
    async def admission() -> Response:
        """What waits and runs, by model."""
        return _json(services.gate.report())

    @app.get("/debug/clients")
    async def clients() -> Response:
        """Names of API keys and their limits."""
        return _json([asdict(client) for client in services.keys.clients])

    @app.get("/debug/tasks")
    async def tasks() -> Response:
        """Where every task of the event loop is."""
        lines = []
        for task in asyncio.all_tasks():
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "done"
            lines.append(f"{task.get_name()} {where}")
        return Response("\n".join(sorted(lines)) + "\n", media_type="text/plain")

    return app


def _seconds(given: str) -> float | None:
    """None if it is no span of time."""
    try:
        seconds = float(given)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data, option=orjson.OPT_INDENT_2), status, media_type="application/json")
