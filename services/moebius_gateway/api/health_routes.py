"""GET /livez, /healthz, /readyz, /health and /accepting: for probes, answered from memory."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from moebius_gateway.api.services import Services


def health_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.api_route("/healthz", methods=["GET", "HEAD"])
    @router.api_route("/livez", methods=["GET", "HEAD"])
    async def livez() -> JSONResponse:
        """The process answers. Whether it can serve is not asked: restarting it would repair nothing."""
        return JSONResponse({"status": "alive"})

    # Where other serving engines say it: benchmark clients ask there before they start.
    @router.api_route("/health", methods=["GET", "HEAD"])
    @router.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> JSONResponse:
        """Whether a request sent now would be served; if not, `reasons` says why."""
        servable, reasons = _readiness(services)
        body = {
            "status": "ready" if servable else "not ready",
            "models": servable,
            "reasons": reasons,
        }
        return JSONResponse(body, 200 if servable else 503)

    @router.api_route("/accepting", methods=["GET", "HEAD"])
    async def accepting() -> JSONResponse:
        """Whether requests should come here: a model is known, and the gateway is not stopping.

        Workers that are gone change nothing: requests wait here for their return.
        """
        known = [model.id for model in services.backend.models() if services.texts.loaded(model)]
        well = bool(known) and not services.lifecycle.draining
        return JSONResponse({"status": "accepting" if well else "not accepting"}, 200 if well else 503)

    return router


def _readiness(services: Services) -> tuple[list[str], list[str]]:
    """The ids of the models that can be served now, and what stands in the way of others."""
    if services.lifecycle.draining:
        return [], ["the gateway is stopping"]
    models = services.backend.models()
    if not models:
        return [], ["no worker has said yet what it serves"]
    servable, reasons = [], []
    for model in models:
        if (failure := services.texts.failure(model)) is not None:
            reasons.append(f"{model.id}: its tokenizer cannot be loaded: {failure}")
        elif not services.texts.loaded(model):
            reasons.append(f"{model.id}: its tokenizer is being loaded")
        elif not services.backend.ready(model.id):
            reasons.append(f"{model.id}: none of its workers is ready")
        else:
            servable.append(model.id)
    return servable, reasons
