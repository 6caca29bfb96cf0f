"""From the internal request to choices that can be generated: model, prompt, grammar, limits."""

import time
from dataclasses import dataclass

from starlette.requests import Request

from moebius_gateway.admission.limits import Client, Priority
from moebius_gateway.api.choices import Choice, check_ids, make_choices
from moebius_gateway.api.constraint import constraint
from moebius_gateway.api.context import context_of
from moebius_gateway.api.errors import invalid
from moebius_gateway.api.model_routes import known_model
from moebius_gateway.api.request import GenerationRequest
from moebius_gateway.api.services import Services
from moebius_gateway.api.size import check_length, check_size
from moebius_gateway.text.conversation import Conversation
from moebius_gateway.text.model import EncodedPrompt, TextModel
from moebius_gateway.types import ModelInfo

# A client's own words come back to it up to this length.
MAX_SHOWN = 64


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
    context = context_of(http)
    model = known_model(services.backend, request.model)
    text = await services.texts.get(model)
    check_size(request, services.settings)
    prompts = await encoded(request, model, text)
    choices = make_choices(
        request,
        prompts,
        model,
        text,
        grammar=await constraint(request, prompts, text),
        request_id=context.request_id,
        deadline=_deadline(services, http),
        client=context.client.name,
        priority=_priority(http, context.client),
    )
    services.gate.charge_prompt(context.client, sum(len(prompt.ids) for prompt in prompts))
    context.model, context.stream = model.id, request.stream
    return Prepared(request, model, text, tuple(prompts), tuple(choices))


async def encoded(
    request: GenerationRequest, model: ModelInfo, text: TextModel, *, special: bool = True
) -> list[EncodedPrompt]:
    """The token ids of all prompts, in order. `special`: with what the tokenizer puts before a text."""
    check_length(request, model)
    if isinstance(request.prompt, Conversation):
        return [await text.encode_chat(request.offered())]
    for prompt in request.prompt:
        if not isinstance(prompt, str):
            check_ids(prompt, model, "prompt")
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    ids = iter(await text.encode(texts, special=special))
    return [EncodedPrompt(next(ids) if isinstance(prompt, str) else prompt) for prompt in request.prompt]


def _deadline(services: Services, http: Request) -> float:
    """On the clock of time.monotonic(): from a header, in seconds from now, or from the settings."""
    limit = services.settings.max_request_timeout
    for header in ("X-Request-Timeout", "Timeout"):
        given = http.headers.get(header)
        if given is None:
            continue
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= limit:
            raise invalid(
                f"{header} must be a number of seconds above 0, at most {limit:g}, not {given[:MAX_SHOWN]!r}"
            )
        return time.monotonic() + seconds
    return time.monotonic() + services.settings.request_timeout


def _priority(http: Request, client: Client) -> int:
    """That of the client, or what its header says if that is less urgent."""
    given = http.headers.get("X-Priority")
    if given is None:
        return client.limits.priority
    wanted = Priority.__members__.get(given.upper())
    if wanted is None or wanted < client.limits.priority:
        may = [priority.name.lower() for priority in Priority if priority >= client.limits.priority]
        raise invalid(f"X-Priority may be {', '.join(may)}, not {given[:MAX_SHOWN]!r}")
    return wanted
