"""Errors as clients see them: OpenAI's error object, over HTTP or as an event of a stream."""

import math
from dataclasses import dataclass

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


@dataclass(eq=False)
class ApiError(Exception):
    """A request is answered with an error. `retry_after`: seconds, None if sending it again is of no use."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def body(self) -> bytes:
        """The error object, as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        elif self.status >= 500:
            # OpenAI's clients send again after a 5xx unless they are told not to.
            headers["X-Should-Retry"] = "false"
        return Response(self.body(), self.status, headers, media_type="application/json")


def of_generation(error: GenerationError) -> ApiError:
    """What a client is told when a generation fails."""
    status, type_ = STATUS[error.reason]
    retry_after = error.retry_after if error.retryable else None
    return ApiError(status, error.message, type_, code=error.reason.value.lower(), retry_after=retry_after)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never be served as it is."""
    return ApiError(400, message, param=param, code=code)
