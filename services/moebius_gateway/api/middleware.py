"""Around every HTTP request: its id, its client, its size, its log line and its metrics. Plain ASGI."""

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moebius_gateway.api.authentication import OPEN, authenticate
from moebius_gateway.api.context import KEY, RequestContext
from moebius_gateway.api.errors import SERVER_ERROR, ApiError, of_generation
from moebius_gateway.api.interruption import ClientGoneError
from moebius_gateway.api.services import Services
from moebius_gateway.types import GenerationError

logger = structlog.get_logger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
# What probes ask for all the time is logged for debugging only.
QUIET = OPEN
# What the log line says beside the request itself, where there is something to say.
TOLD = ("model", "stream", "prompt_tokens", "generated_tokens", "error")
# For the log and the metrics: the client left before there was a status.
CLIENT_CLOSED_REQUEST = 499


class RequestMiddleware:
    """Accepts `X-Request-Id` or makes an id, and returns it. Answers whatever happens inside."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._lifecycle = services.lifecycle
        self._metrics = services.metrics
        self._keys = services.keys
        self._gate = services.gate
        self._max_body_bytes = services.settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        context = RequestContext(given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}")
        scope[KEY] = context
        status: int | None = None

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = context.request_id
            await send(message)

        with (
            structlog.contextvars.bound_contextvars(request_id=context.request_id),
            nullcontext() if scope["path"] in QUIET else self._in_flight(),
        ):
            try:
                self._let_in(scope, headers, context)
                await self._app(scope, _limited(scope, receive, self._max_body_bytes), observed_send)
            except (ApiError, GenerationError) as refusal:  # the routes' own are answered further inside
                told = refusal if isinstance(refusal, ApiError) else of_generation(refusal)
                context.error = told.code
                await told.response(scope["path"])(scope, receive, observed_send)
            except ClientGoneError:
                self._metrics.disconnects.inc()
                context.error = "client_disconnected"
            except Exception:
                logger.exception("unexpected error")
                context.error = "internal_error"
                if status is None:
                    error = ApiError(500, "internal error", SERVER_ERROR, code="internal_error")
                    await error.response(scope["path"])(scope, receive, observed_send)
            finally:
                self._record(scope, context, status or CLIENT_CLOSED_REQUEST)

    def _let_in(self, scope: Scope, headers: Headers, context: RequestContext) -> None:
        """Raises `ApiError` without a valid key, `GenerationError` if the client asks too often."""
        if scope["path"] in OPEN:
            return
        context.client = authenticate(headers, self._keys)
        if scope["method"] == "POST":
            self._gate.charge_request(context.client)

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        with self._lifecycle.request(), self._metrics.request_in_flight():
            yield

    def _record(self, scope: Scope, context: RequestContext, status: int) -> None:
        route = getattr(scope.get("route"), "path", "other")
        seconds = time.perf_counter() - context.arrived
        self._metrics.requests.labels(route, str(status), str(context.stream).lower()).inc()
        if context.model is not None:
            self._metrics.answered(context.model, context.stream, seconds)
        log = logger.debug if scope["path"] in QUIET else logger.info
        told = {name: value for name in TOLD if (value := getattr(context, name))}
        if context.client.name:
            told["client"] = context.client.name
        log(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=round(seconds, 4),
            **told,
        )


def _limited(scope: Scope, receive: Receive, limit: int) -> Receive:
    """`receive`, until the body gets longer than `limit` bytes: then it raises `ApiError`."""
    announced = Headers(scope=scope).get("content-length", "")
    received = 0

    async def limited_receive() -> Message:
        nonlocal received
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
        if announced.isdecimal() and int(announced) > limit:
            raise too_large
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise too_large
        return message

    return limited_receive
