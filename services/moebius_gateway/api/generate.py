"""Runs the choices of a request, and hands each piece of an answer on as it comes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from moebius_gateway.api.backend import Backend
from moebius_gateway.api.choices import Choice
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.text.assembler import AnswerDelta

Deliver = Callable[[Choice, AnswerDelta], Awaitable[None]]


async def generate(
    backend: Backend, choices: Sequence[Choice], deliver: Deliver, metrics: GatewayMetrics, arrived: float
) -> None:
    """Returns when every choice has been delivered to its finish reason.

    Raises `GenerationError` as soon as one fails; then, and when cancelled, all are cancelled at their
    workers. `arrived`: when the request came, on the clock of time.perf_counter().
    """
    if len(choices) == 1:
        return await _generate_one(backend, choices[0], deliver, metrics, arrived)
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_generate_one(backend, choice, deliver, metrics, arrived))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _generate_one(
    backend: Backend, choice: Choice, deliver: Deliver, metrics: GatewayMetrics, arrived: float
) -> None:
    with metrics.generation(choice.generation.model, arrived) as clock:
        async with aclosing(backend.stream(choice.generation)) as stream:
            async for tokens in stream:
                if tokens.token_ids:
                    clock.tokens(len(tokens.token_ids))
                choice.cached_tokens = max(choice.cached_tokens, tokens.cached_tokens)
                delta = choice.text.push(tokens)
                if delta.events or delta.logprobs or delta.finish_reason:
                    await deliver(choice, delta)
                if delta.finish_reason:
                    return
        raise RuntimeError("a stream of tokens ended without a finish reason")
