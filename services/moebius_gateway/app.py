"""Puts the HTTP application together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.backend import Backend
from moebius_gateway.api.context import context_of
from moebius_gateway.api.errors import SERVER_ERROR, ApiError, invalid, of_generation, unknown_url
from moebius_gateway.api.generation_routes import generation_router
from moebius_gateway.api.health_routes import health_router
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.api.middleware import RequestMiddleware
from moebius_gateway.api.model_routes import model_router
from moebius_gateway.api.responses.routes import responses_router
from moebius_gateway.api.services import Services
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.text.errors import PromptError, TextError
from moebius_gateway.text.registry import TextModels
from moebius_gateway.types import GenerationError

# Seconds between looks for models whose text side is not loaded yet.
TEXT_MODELS_INTERVAL = 0.5


def build_app(
    settings: GatewaySettings, backend: Backend, lifecycle: Lifecycle, registry: CollectorRegistry
) -> FastAPI:
    """The app starts and stops `backend` with itself; whoever runs the app drains `lifecycle` first."""
    texts = TextModels(backend.tokenizer_files, settings.answer_formats)
    services = Services(settings, backend, texts, lifecycle, GatewayMetrics(registry), registry)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        loading = asyncio.create_task(texts.keep_loaded(backend.models, TEXT_MODELS_INTERVAL))
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await backend.stop()

    app = FastAPI(title="Moebius", openapi_url=None, lifespan=running, redirect_slashes=False)
    app.include_router(generation_router(services))
    app.include_router(responses_router(services))
    app.include_router(model_router(backend))
    app.include_router(health_router(services))
    app.add_middleware(
        RequestMiddleware,
        lifecycle=lifecycle,
        metrics=services.metrics,
        max_body_bytes=settings.max_body_bytes,
    )
    for error in (ApiError, GenerationError, TextError, PromptError, HTTPException):
        app.add_exception_handler(error, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    answer = _as_api_error(request, error)
    context_of(request).error = answer.code or answer.message
    response = answer.response(request.url.path)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)  # Allow, behind a wrong method
    return response


def _as_api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case GenerationError():
            return of_generation(error)
        case PromptError():
            return invalid(str(error), error.param)
        case TextError():
            message = f"this model's tokenizer cannot be used: {error}"
            return ApiError(503, message, SERVER_ERROR, code="tokenizer_unusable", retry_after=5)
        case HTTPException(status_code=404):
            return unknown_url(request.url.path)
        case HTTPException(status_code=405):
            message = f"method not allowed: {request.method} {request.url.path}"
            return ApiError(405, message, code="method_not_allowed")
        case HTTPException():
            return ApiError(error.status_code, error.detail)
    raise error
