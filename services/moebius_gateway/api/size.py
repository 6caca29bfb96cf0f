"""Is a request too large to be worth any work? Told before it is tokenized, compiled, or put into a queue."""

from collections.abc import Iterator
from typing import Any

import orjson

from moebius_gateway.api.errors import invalid
from moebius_gateway.api.request import GenerationRequest
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.text.conversation import Conversation
from moebius_gateway.types import ModelInfo

# Text has some four characters a token; what would need more than this to fit does not fit.
MAX_CHARACTERS_PER_TOKEN = 32


def check_size(request: GenerationRequest, settings: GatewaySettings) -> None:
    """Raises `ApiError`."""
    if isinstance(request.prompt, Conversation) and len(request.prompt.messages) > settings.max_messages:
        raise invalid(
            f"there are {len(request.prompt.messages)} messages; at most {settings.max_messages} may be",
            "messages",
        )
    size = sum(len(orjson.dumps(schema)) for schema in _schemas(request))
    if size > settings.max_schema_bytes:
        param = request.grammar.param if request.grammar is not None else "tools"
        raise invalid(
            f"schemas and grammars take {size} bytes; at most {settings.max_schema_bytes} may be", param
        )


def check_length(request: GenerationRequest, model: ModelInfo) -> None:
    """Raises `ApiError` for a prompt of which it is clear, without a tokenizer, that it does not fit."""
    for length, unit in _lengths(request):
        if length > model.max_model_len * (MAX_CHARACTERS_PER_TOKEN if unit == "characters" else 1):
            raise invalid(
                f"this model's context is {model.max_model_len} tokens; the prompt has {length} {unit}",
                code="context_length_exceeded",
            )


def _lengths(request: GenerationRequest) -> Iterator[tuple[int, str]]:
    """Of each prompt, with the unit."""
    if isinstance(request.prompt, Conversation):
        yield request.prompt.characters(), "characters"
        return
    for prompt in request.prompt:
        yield len(prompt), "characters" if isinstance(prompt, str) else "tokens"


def _schemas(request: GenerationRequest) -> Iterator[Any]:
    if request.grammar is not None:
        yield dict(request.grammar.part)
    if isinstance(request.prompt, Conversation):
        for tool in request.prompt.tools:
            yield dict(tool.parameters)
