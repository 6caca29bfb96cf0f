"""Runs what was prepared, and sends the answer in a dialect: in one piece or as events."""

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.answer import Answer
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.context import RequestContext, context_of
from moebius_gateway.api.dialect import Dialect
from moebius_gateway.api.generate import generate
from moebius_gateway.api.interruption import unless_interrupted
from moebius_gateway.api.prepare import Prepared
from moebius_gateway.api.services import Services
from moebius_gateway.api.sse import EventSender, EventStream
from moebius_gateway.text.assembler import AnswerDelta


async def deliver(services: Services, http: Request, prepared: Prepared, dialect: Dialect) -> Response:
    context = context_of(http)
    deadline = prepared.choices[0].generation.deadline
    if prepared.request.stream:
        produce = streaming(services, prepared, dialect, context)
        interval = services.settings.keep_alive_interval
        return EventStream(produce, dialect.error, services.lifecycle, services.metrics, interval, deadline)
    work = collected(services, prepared, context)
    answers, usage = await unless_interrupted(work, http.receive, services.lifecycle, deadline)
    return Response(dialect.response(answers, usage), media_type="application/json")


async def collected(
    services: Services, prepared: Prepared, context: RequestContext
) -> tuple[list[Answer], Usage]:
    """The whole answer to each choice."""
    answers = [Answer() for _ in prepared.choices]

    async def collect(choice: Choice, delta: AnswerDelta) -> None:
        answers[choice.index].add(delta)

    await generate(services.backend, prepared.choices, collect, services.metrics, context.arrived)
    return answers, _finished(services, prepared, context)


def streaming(
    services: Services, prepared: Prepared, dialect: Dialect, context: RequestContext
) -> Callable[[EventSender], Coroutine[Any, Any, None]]:
    """What sends all events of a good stream."""

    async def produce(sender: EventSender) -> None:
        async def send(choice: Choice, delta: AnswerDelta) -> None:
            if events := dialect.chunk(choice, delta):
                await sender.send(events)

        await generate(services.backend, prepared.choices, send, services.metrics, context.arrived)
        await sender.send(dialect.end(_finished(services, prepared, context)), more=False)

    return produce


def _finished(services: Services, prepared: Prepared, context: RequestContext) -> Usage:
    usage = Usage.of(prepared.choices)
    context.prompt_tokens, context.generated_tokens = usage.prompt_tokens, usage.completion_tokens
    services.metrics.prompt_tokens.labels(prepared.model.id).inc(usage.prompt_tokens)
    services.metrics.cached_tokens.labels(prepared.model.id).inc(usage.cached_tokens)
    return usage
