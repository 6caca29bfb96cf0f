"""The body of POST /v1/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from moebius_gateway.api.openai.parameters import MAX_CHOICES, GenerationParameters
from moebius_gateway.api.openai.structured import ResponseFormat, the_one
from moebius_gateway.api.request import GenerationRequest
from moebius_gateway.api.strict import refuse


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
    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str | list[int]]),
    ] = Field(description="a string, token ids, or a list of these; at most 128 prompts times `n`")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="not together with `logprobs`")
    response_format: ResponseFormat | None = Field(None, description="as in chat completions")

    neutral: ClassVar = GenerationParameters.neutral | {
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }

    @model_validator(mode="after")
    def _agree(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise refuse("echo", "cannot be had together with 'logprobs': a prompt has none here")
        return self

    def translated(self) -> GenerationRequest:
        """Raises `ApiError`."""
        formats = self.response_format.wanted("response_format") if self.response_format is not None else []
        return GenerationRequest(
            model=self.model,
            prompt=tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt),
            sampling=self.sampling(),
            n=self.n,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            grammar=the_one(formats + self.guided()),
            logprobs=self.logprobs,
            stream=self.stream,
        )
