"""The routes of responses."""

import asyncio
import secrets
from typing import Any

import orjson
import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.body import parse
from moebius_gateway.api.context import context_of
from moebius_gateway.api.delivery import collected, deliver
from moebius_gateway.api.errors import ApiError, invalid, of_generation
from moebius_gateway.api.interruption import unless_interrupted
from moebius_gateway.api.model_routes import known_model
from moebius_gateway.api.prepare import Prepared, encoded, prepare
from moebius_gateway.api.responses.answer import ResponsesDialect
from moebius_gateway.api.responses.items import conversation_items
from moebius_gateway.api.responses.request import (
    ENCRYPTED,
    LOGPROBS,
    InputTokensRequest,
    ResponsesRequest,
)
from moebius_gateway.api.responses.store import ResponseStore, Stored
from moebius_gateway.api.services import Services
from moebius_gateway.types import GenerationError

logger = structlog.get_logger(__name__)
MAX_LISTED = 100


def responses_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")
    store = ResponseStore()

    @router.post("")
    async def create(request: Request) -> Response:
        services.lifecycle.check_admission()
        body = await parse(request, ResponsesRequest)
        owner = _client(request)
        history = _history(store, body.previous_response_id, owner)
        prepared = await prepare(services, request, body.translated(history))
        items = [*history, *body.input]

        def keep(response: dict[str, Any]) -> None:
            if body.store and not body.background:
                store.put(Stored(owner, response, _listed(body), items))

        dialect = ResponsesDialect(
            prepared.model.id,
            body.told(),
            prepared.text.token_bytes,
            keep,
            logprobs=LOGPROBS in body.include,
            encrypted=ENCRYPTED in body.include,
        )
        if not body.background:
            return await deliver(services, request, prepared, dialect)
        stored = Stored(owner, dialect.unfinished("in_progress"), _listed(body), items)
        stored.task = asyncio.create_task(_in_background(services, request, prepared, dialect, store, stored))
        store.put(stored)
        return _json(stored.response)

    @router.post("/input_tokens")
    async def input_tokens(request: Request) -> Response:
        services.lifecycle.check_admission()
        body = await parse(request, InputTokensRequest)
        wanted = body.translated(_history(store, body.previous_response_id, _client(request)))
        model = known_model(services.backend, body.model)
        [prompt] = await encoded(wanted, model, await services.texts.get(model))
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})

    @router.get("/{id_}")
    async def retrieve(request: Request, id_: str) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise invalid("a stored response cannot be streamed: poll for it", "stream")
        return _json(store.get(id_, _client(request)).response)

    @router.delete("/{id_}")
    async def delete(request: Request, id_: str) -> Response:
        store.delete(id_, _client(request))
        return _json({"id": id_, "object": "response", "deleted": True})

    @router.post("/{id_}/cancel")
    async def cancel(request: Request, id_: str) -> Response:
        stored = store.get(id_, _client(request))
        if not stored.response["background"]:
            raise invalid("only a response with 'background' can be cancelled; close the connection instead")
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.gather(stored.task, return_exceptions=True)
        return _json(stored.response)

    @router.get("/{id_}/input_items")
    async def input_items(request: Request, id_: str) -> Response:
        return _json(_page(store.get(id_, _client(request)).input_items, request.query_params))

    return router


async def _in_background(
    services: Services,
    request: Request,
    prepared: Prepared,
    dialect: ResponsesDialect,
    store: ResponseStore,
    stored: Stored,
) -> None:
    """Generates, and writes what comes of it into the store."""

    async def nobody_leaves() -> Any:
        await asyncio.Event().wait()

    response = dialect.unfinished("cancelled")
    try:
        with services.lifecycle.request():
            work = collected(services, prepared, context_of(request))
            deadline = prepared.choices[0].generation.deadline
            [answer], usage = await unless_interrupted(work, nobody_leaves, services.lifecycle, deadline)
        response = dialect.whole(answer, usage)
    except (ApiError, GenerationError) as error:
        told = error if isinstance(error, ApiError) else of_generation(error)
        response = dialect.unfinished("failed", {"code": told.code or told.type, "message": told.message})
    except Exception:
        logger.exception("a response in the background failed")
        response = dialect.unfinished("failed", {"code": "internal_error", "message": "internal error"})
    finally:
        stored.task = None
        store.replace(stored, response)


def _client(request: Request) -> str:
    return context_of(request).client.name


def _history(store: ResponseStore, previous: str | None, owner: str) -> list[Any]:
    if previous is None:
        return []
    stored = store.get(previous, owner, "previous_response_id")
    if stored.task is not None:
        raise invalid("the previous response is not finished", "previous_response_id")
    return [*stored.items, *conversation_items(stored.response["output"])]


def _listed(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The request's own items, with ids."""
    return [
        {"id": f"item_{secrets.token_hex(12)}", **item.model_dump(exclude_none=True)} for item in body.input
    ]


def _page(items: list[dict[str, Any]], query: Any) -> dict[str, Any]:
    """By default the newest first, as everything that OpenAI lists."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("'order' is 'asc' or 'desc'", "order")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    after = query.get("after")
    if after is not None and after not in ids:
        raise invalid(f"there is no item '{after}'", "after")
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
        raise invalid(f"'limit' is from 1 to {MAX_LISTED}", "limit")
    rest = ordered[ids.index(after) + 1 if after is not None else 0 :]
    data = rest[: int(limit)]
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, "has_more": len(rest) > len(data), **ends}


def _json(data: dict[str, Any]) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
