"""POST routes without a state: a way in for each dialect, and one path behind them."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.anthropic.messages_answer import MessagesDialect
from moebius_gateway.api.anthropic.messages_request import CountRequest, MessagesRequest
from moebius_gateway.api.body import parse
from moebius_gateway.api.delivery import deliver
from moebius_gateway.api.model_routes import known_model
from moebius_gateway.api.openai.chat_answer import ChatDialect
from moebius_gateway.api.openai.chat_request import ChatRequest
from moebius_gateway.api.openai.completion_answer import CompletionDialect
from moebius_gateway.api.openai.completion_request import CompletionRequest
from moebius_gateway.api.prepare import encoded, prepare
from moebius_gateway.api.services import Services
from moebius_gateway.api.tokenization import detokenize, tokenize

Handler = Callable[[Services, Request], Awaitable[Response]]


async def chat_completions(services: Services, http: Request) -> Response:
    body = await parse(http, ChatRequest)
    prepared = await prepare(services, http, body.translated())
    dialect = ChatDialect(
        prepared.model.id,
        prepared.text.token_bytes,
        logprobs=body.logprobs,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    return await deliver(services, http, prepared, dialect)


async def completions(services: Services, http: Request) -> Response:
    body = await parse(http, CompletionRequest)
    prepared = await prepare(services, http, body.translated())
    dialect = CompletionDialect(
        prepared.model.id,
        prepared.text.token_bytes,
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        echo=[prepared.text.decode(c.generation.prompt_ids) for c in prepared.choices] if body.echo else (),
    )
    return await deliver(services, http, prepared, dialect)


async def messages(services: Services, http: Request) -> Response:
    body = await parse(http, MessagesRequest)
    prepared = await prepare(services, http, body.translated())
    dialect = MessagesDialect(prepared.model.id, len(prepared.prompts[0].ids))
    return await deliver(services, http, prepared, dialect)


async def count_tokens(services: Services, http: Request) -> Response:
    request = (await parse(http, CountRequest)).translated()
    model = known_model(services.backend, request.model)
    [prompt] = await encoded(request, model, await services.texts.get(model))
    return Response(b'{"input_tokens":%d}' % len(prompt.ids), media_type="application/json")


ROUTES: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": tokenize,
    "/v1/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/detokenize": detokenize,
}


def generation_router(services: Services) -> APIRouter:
    router = APIRouter()

    def add(path: str, handler: Handler) -> None:
        async def route(request: Request) -> Response:
            services.lifecycle.check_admission()
            return await handler(services, request)

        router.add_api_route(path, route, methods=["POST"])

    for path, handler in ROUTES.items():
        add(path, handler)
    return router
