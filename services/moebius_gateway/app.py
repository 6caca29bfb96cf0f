"""Puts the HTTP application together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.admission.backend import GatedBackend
from moebius_gateway.admission.gate import Gate
from moebius_gateway.admission.limits import GateOptions
from moebius_gateway.admission.metrics import AdmissionMetrics
from moebius_gateway.api.backend import Backend
from moebius_gateway.api.context import context_of
from moebius_gateway.api.errors import SERVER_ERROR, ApiError, invalid, of_generation, unknown_url
from moebius_gateway.api.generation_routes import generation_router
from moebius_gateway.api.health_routes import health_router
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.api.middleware import RequestMiddleware
from moebius_gateway.api.model_routes import model_router
from moebius_gateway.api.openapi import openapi_router
from moebius_gateway.api.responses.routes import responses_router
from moebius_gateway.api.services import Services
from moebius_gateway.auth.key_ring import KeyRing
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.text.errors import PromptError, TextError
from moebius_gateway.text.registry import TextModels
from moebius_gateway.types import GenerationError

# Seconds between looks for models whose text side is not loaded yet.
TEXT_MODELS_INTERVAL = 0.5


def build_services(
    settings: GatewaySettings, backend: Backend, lifecycle: Lifecycle, registry: CollectorRegistry
) -> Services:
    """What the apps work with. Raises `KeysError` if the file with API keys cannot be used."""
    options = GateOptions(settings.max_waiting, settings.max_wait)
    gate = Gate(options, backend.ready_workers, AdmissionMetrics(registry))
    return Services(
        settings,
        GatedBackend(backend, gate),
        TextModels(backend.tokenizer_files, settings.answer_formats),
        lifecycle,
        GatewayMetrics(registry),
        registry,
        gate,
        KeyRing(settings.api_keys, registry),
    )


def build_app(services: Services) -> FastAPI:
    """The app starts and stops the backend with itself; whoever runs it drains `lifecycle` first."""
    backend, texts = services.backend, services.texts

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        keeping = [
            asyncio.create_task(texts.keep_loaded(backend.models, TEXT_MODELS_INTERVAL)),
            asyncio.create_task(services.keys.keep_current()),
        ]
        try:
            yield
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await backend.stop()

    app = FastAPI(title="Moebius", openapi_url=None, lifespan=running, redirect_slashes=False)
    app.include_router(generation_router(services))
    app.include_router(responses_router(services))
    app.include_router(model_router(backend))
    app.include_router(health_router(services))
    app.include_router(openapi_router())
    app.add_middleware(RequestMiddleware, services=services)
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
