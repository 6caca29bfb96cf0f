"""What is known about an HTTP request while it is answered, for its log line and metrics."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from moebius_gateway.admission.limits import Client

KEY = "moebius.context"


@dataclass(slots=True)
class RequestContext:
    """Made by the middleware; filled in by whoever learns more."""

    request_id: str
    # On the clock of time.perf_counter().
    arrived: float = field(default_factory=time.perf_counter)
    # Of a served model: only these become metric labels.
    model: str | None = None
    stream: bool = False
    client: Client = field(default_factory=Client)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    # The error's code or message, if the request ended with one.
    error: str | None = None


def context_of(request: Request) -> RequestContext:
    context: RequestContext = request.scope[KEY]
    return context
