"""Errors as clients see them: an object in the shape of the API that was called, over HTTP or in a stream."""

import math
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from moebius_gateway.types import GenerationError, Reason

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

# HTTP status and error type of each reason for which a generation fails. The code is the reason's own name.
STATUS: dict[Reason, tuple[int, str]] = {
    Reason.OVERLOADED: (429, "rate_limit_error"),
    Reason.DRAINING: (503, SERVER_ERROR),
    Reason.NOT_READY: (503, SERVER_ERROR),
    Reason.ENGINE_DEAD: (503, SERVER_ERROR),
    Reason.ENGINE_STALLED: (503, SERVER_ERROR),
    Reason.GPU_FAULT: (503, SERVER_ERROR),
    # The request cannot fit into the KV cache even alone: only a smaller one can.
    Reason.KV_EXHAUSTED: (400, INVALID_REQUEST),
    Reason.BAD_REQUEST: (400, INVALID_REQUEST),
    Reason.POISONED: (500, SERVER_ERROR),
}

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# First part of a path behind /v1/, and what it is about.
UNSERVED = {
    "assistants": "assistants",
    "audio": "speech",
    "batches": "batches",
    "containers": "containers",
    "conversations": "conversations",
    "embeddings": "embeddings",
    "evals": "evaluations",
    "files": "files",
    "fine_tuning": "fine-tuning",
    "images": "images",
    "moderations": "moderation",
    "realtime": "realtime sessions",
    "rerank": "reranking",
    "score": "scoring",
    "skills": "skills",
    "threads": "threads",
    "uploads": "uploads",
    "vector_stores": "vector stores",
    "videos": "videos",
}


@dataclass(eq=False)
class ApiError(Exception):
    """A request is answered with an error. `retry_after`: seconds, None if sending it again is of no use."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def body(self, path: str = "") -> bytes:
        """The error object, as JSON, in the shape of the API whose URL has this path."""
        return orjson.dumps(self.anthropic() if is_anthropic(path) else self.openai())

    def openai(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        elif self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif self.status >= 500:
            # OpenAI's and Anthropic's clients send again after a 5xx unless they are told not to.
            headers["X-Should-Retry"] = "false"
        return Response(self.body(path), self.status, headers, media_type="application/json")


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def of_generation(error: GenerationError) -> ApiError:
    """What a client is told when a generation fails."""
    status, type_ = STATUS[error.reason]
    retry_after = error.retry_after if error.retryable else None
    code = error.code or error.reason.value.lower()
    return ApiError(status, error.message, type_, code=code, retry_after=retry_after)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unknown_url(path: str) -> ApiError:
    """What else the APIs have, and this gateway has not, is called that."""
    name = path.removeprefix("/v1/").partition("/")[0]
    if path.startswith("/v1/") and name in UNSERVED:
        return ApiError(
            404,
            f"{path} is not served here: this gateway generates text, it has no {UNSERVED[name]}",
            code="unsupported_endpoint",
        )
    return ApiError(404, f"unknown URL: {path}", code="unknown_url")
