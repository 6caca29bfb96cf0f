"""From the internal request to choices that can be generated: model, prompt, grammar, limits."""

import time
from dataclasses import dataclass

from starlette.requests import Request

from moebius_gateway.api.choices import Choice, check_ids, make_choices
from moebius_gateway.api.constraint import constraint
from moebius_gateway.api.context import context_of
from moebius_gateway.api.errors import invalid
from moebius_gateway.api.model_routes import known_model
from moebius_gateway.api.request import GenerationRequest
from moebius_gateway.api.services import Services
from moebius_gateway.text.conversation import Conversation
from moebius_gateway.text.model import EncodedPrompt, TextModel
from moebius_gateway.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be answered; `choices` are all of one model and one deadline."""

    request: GenerationRequest
    model: ModelInfo
    text: TextModel
    prompts: tuple[EncodedPrompt, ...]
    choices: tuple[Choice, ...]


async def prepare(services: Services, http: Request, request: GenerationRequest) -> Prepared:
    """Raises `ApiError`, and what the text side raises, for what cannot be served."""
    model = known_model(services.backend, request.model)
    text = await services.texts.get(model)
    prompts = await encoded(request, model, text)
    context = context_of(http)
    choices = make_choices(
        request,
        prompts,
        model,
        text,
        grammar=await constraint(request, prompts, text),
        request_id=context.request_id,
        deadline=_deadline(services, http),
    )
    context.model, context.stream = model.id, request.stream
    return Prepared(request, model, text, tuple(prompts), tuple(choices))


async def encoded(request: GenerationRequest, model: ModelInfo, text: TextModel) -> list[EncodedPrompt]:
    """The token ids of all prompts, in order."""
    if isinstance(request.prompt, Conversation):
        return [await text.encode_chat(request.offered())]
    for prompt in request.prompt:
        if not isinstance(prompt, str):
            check_ids(prompt, model, "prompt")
    ids = iter(await text.encode([prompt for prompt in request.prompt if isinstance(prompt, str)]))
    return [EncodedPrompt(next(ids) if isinstance(prompt, str) else prompt) for prompt in request.prompt]


def _deadline(services: Services, http: Request) -> float:
    """On the clock of time.monotonic(): from the header, in seconds from now, or from the settings."""
    limit = services.settings.max_request_timeout
    given = http.headers.get("x-request-timeout")
    if given is None:
        return time.monotonic() + services.settings.request_timeout
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= limit:
        raise invalid(
            f"X-Request-Timeout must be a number of seconds above 0, at most {limit:g}, not {given!r}"
        )
    return time.monotonic() + seconds
