"""GET /v1/models and /v1/models/{id}."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from moebius_gateway.api.backend import Backend
from moebius_gateway.api.errors import ApiError, of_generation
from moebius_gateway.types import GenerationError, ModelInfo, Reason

# A worker that attaches says what it serves within a moment, one that loads within its own time; in seconds.
RETRY_AFTER = 2.0


def known_model(backend: Backend, model_id: str) -> ModelInfo:
    """Raises `ApiError`: 404 if no worker was ever seen that serves it, 503 while none was seen at all."""
    model = backend.model(model_id)
    if model is not None:
        return model
    served = ", ".join(f"'{known.id}'" for known in backend.models())
    if not served:
        raise of_generation(
            GenerationError(
                Reason.NOT_READY,
                "no worker has said yet what it serves; try again shortly",
                retryable=True,
                retry_after=RETRY_AFTER,
            )
        )
    raise ApiError(
        404,
        f"the model '{model_id}' does not exist; served: {served}",
        param="model",
        code="model_not_found",
    )


def model_router(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        listed = [_as_json(model) for model in backend.models()]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
        return {"object": "list", "data": listed, "has_more": False, **ends}

    # Names may contain slashes, as on Hugging Face.
    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        return _as_json(known_model(backend, model_id))

    return router


def _as_json(model: ModelInfo) -> dict[str, Any]:
    """What OpenAI's and Anthropic's clients each expect, in one."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "moebius",
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "max_model_len": model.max_model_len,
        "architecture": model.architecture,
    }
