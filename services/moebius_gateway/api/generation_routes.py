"""POST /v1/chat/completions and /v1/completions: the same path with two ways in and two ways out."""

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.body import parse
from moebius_gateway.api.chat_dialect import ChatDialect
from moebius_gateway.api.chat_request import ChatRequest
from moebius_gateway.api.choices import Choice, Usage, make_choices
from moebius_gateway.api.completion_dialect import CompletionDialect
from moebius_gateway.api.completion_request import CompletionRequest
from moebius_gateway.api.context import context_of
from moebius_gateway.api.dialect import Answer, Dialect
from moebius_gateway.api.errors import invalid
from moebius_gateway.api.generate import generate
from moebius_gateway.api.interruption import unless_interrupted
from moebius_gateway.api.model_routes import known_model
from moebius_gateway.api.parameters import GenerationParameters
from moebius_gateway.api.services import Services
from moebius_gateway.api.sse import EventSender, EventStream
from moebius_gateway.text.assembler import TextDelta
from moebius_gateway.text.model import TextModel
from moebius_gateway.types import ModelInfo


def generation_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        services.lifecycle.check_admission()
        body = await parse(request, ChatRequest)
        model = known_model(services.backend, body.model)
        text = await services.texts.get(model)
        prompt = await text.encode_chat([m.model_dump(exclude_none=True) for m in body.messages])
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = body.top_logprobs if body.logprobs else None
        choices = _choices(services, request, body, [prompt], model, text, max_tokens, logprobs)
        dialect = ChatDialect(
            model.id, text.token_bytes, logprobs=body.logprobs, include_usage=_include_usage(body)
        )
        return await _answer(services, request, body.stream, dialect, choices)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        services.lifecycle.check_admission()
        body = await parse(request, CompletionRequest)
        model = known_model(services.backend, body.model)
        text = await services.texts.get(model)
        prompts = await _prompt_ids(body.prompt, text, model)
        choices = _choices(services, request, body, prompts, model, text, body.max_tokens, body.logprobs)
        dialect = CompletionDialect(
            model.id,
            text.token_bytes,
            logprobs=body.logprobs is not None,
            include_usage=_include_usage(body),
        )
        return await _answer(services, request, body.stream, dialect, choices)

    return router


def _include_usage(body: GenerationParameters) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _prompt_ids(
    prompts: Sequence[str | list[int]], text: TextModel, model: ModelInfo
) -> list[tuple[int, ...]]:
    for prompt in prompts:
        if not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise invalid(f"invalid value for 'prompt': token ids are in [0, {model.vocab_size})", "prompt")
    encoded = iter(await text.encode([prompt for prompt in prompts if isinstance(prompt, str)]))
    return [next(encoded) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


def _deadline(services: Services, request: Request) -> float:
    """On the clock of time.monotonic(): from the header, in seconds from now, or from the settings."""
    limit = services.settings.max_request_timeout
    given = request.headers.get("x-request-timeout")
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


def _choices(
    services: Services,
    request: Request,
    body: GenerationParameters,
    prompts: Sequence[tuple[int, ...]],
    model: ModelInfo,
    text: TextModel,
    max_tokens: int | None,
    logprobs: int | None,
) -> list[Choice]:
    context = context_of(request)
    choices = make_choices(
        body,
        prompts,
        model,
        text,
        max_tokens=max_tokens,
        logprobs=logprobs,
        request_id=context.request_id,
        deadline=_deadline(services, request),
    )
    context.model, context.stream = model.id, body.stream
    return choices


async def _answer(
    services: Services, request: Request, stream: bool, dialect: Dialect, choices: Sequence[Choice]
) -> Response:
    context = context_of(request)
    # All choices have the request's.
    deadline = choices[0].generation.deadline

    def finished() -> Usage:
        usage = Usage.of(choices)
        context.prompt_tokens, context.generated_tokens = usage.prompt_tokens, usage.completion_tokens
        services.metrics.prompt_tokens.labels(context.model).inc(usage.prompt_tokens)
        services.metrics.cached_tokens.labels(context.model).inc(usage.cached_tokens)
        return usage

    async def produce(sender: EventSender) -> None:
        async def deliver(choice: Choice, delta: TextDelta) -> None:
            await sender.send(dialect.chunk(choice, delta))

        await generate(services.backend, choices, deliver, services.metrics, context.arrived)
        await sender.send(dialect.end(finished()), more=False)

    if stream:
        interval = services.settings.keep_alive_interval
        return EventStream(produce, services.lifecycle, services.metrics, interval, deadline)

    answers = [Answer() for _ in choices]

    async def collect(choice: Choice, delta: TextDelta) -> None:
        answers[choice.index].add(delta)

    work = generate(services.backend, choices, collect, services.metrics, context.arrived)
    await unless_interrupted(work, request.receive, services.lifecycle, deadline)
    return Response(dialect.response(answers, finished()), media_type="application/json")
