"""The body of POST /v1/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from moebius_gateway.api.parameters import MAX_CHOICES, GenerationParameters


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, a list of texts, a list of token ids, or a list of such lists: always as a list of prompts."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(p, str) or _is_ids(p) for p in value):
        raise PydanticCustomError("prompt", "must be a string, token ids, or a list of one or more of these")
    if len(value) > MAX_CHOICES:
        raise PydanticCustomError("prompt", f"must not be more than {MAX_CHOICES} prompts")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


class CompletionRequest(GenerationParameters):
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=20)

    neutral: ClassVar = GenerationParameters.neutral | {"echo": (False,), "suffix": ("",)}
