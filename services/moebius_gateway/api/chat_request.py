"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moebius_gateway.api.parameters import GenerationParameters, Strict


def _text(content: Any) -> Any:
    """Joins text parts, each to a line of its own."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "content_part", "only text parts are supported, not {kind}", {"kind": repr(kind)}
            )
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError(
                "content_part", "a text part has the keys 'type' and 'text', and no other"
            )
    return "\n".join(part["text"] for part in content)


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None
    tool_call_id: str | None = None

    # What OpenAI's answers carry, so that an answer can be sent back as it came.
    neutral: ClassVar = {
        "tool_calls": ([],),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
    }


class ChatRequest(GenerationParameters):
    messages: Annotated[list[Message], Field(min_length=1)]
    # The newer name of max_tokens.
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    neutral: ClassVar = GenerationParameters.neutral | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "documents": ([],),
    }

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "needs 'logprobs': true", {"name": "top_logprobs"})
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise PydanticCustomError(
                "max_tokens",
                "differs from 'max_completion_tokens', of which it is the older name",
                {"name": "max_tokens"},
            )
        return self
