"""Messages and tools of a chat in OpenAI's words."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from moebius_gateway.api.strict import ANYTHING, Many, Strict, refuse
from moebius_gateway.api.text_parts import joined
from moebius_gateway.text import conversation

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
TEXTS = {"text": "text", "refusal": "refusal"}
Text = Annotated[
    str,
    BeforeValidator(partial(joined, texts=TEXTS), json_schema_input_type=str | list[dict[str, Any]]),
]


class Called(Strict):
    name: ToolName
    arguments: str


class ToolCall(Strict):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: Called
    # What deltas of streams have; the order says the same.
    neutral: ClassVar = {"index": (ANYTHING,)}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Many[ToolCall] = Field([])
    reasoning_content: str = ""
    reasoning: str = ""

    # What OpenAI's answers carry, so that an answer can be sent back as it came.
    neutral: ClassVar = {
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
    }

    @model_validator(mode="after")
    def _roles(self) -> "Message":
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning"):
                if getattr(self, name):
                    raise refuse(name, "belongs to the role 'assistant'")
        if self.tool_call_id is not None and self.role != "tool":
            raise refuse("tool_call_id", "belongs to the role 'tool'")
        if self.content is None and not (self.tool_calls or self.reasoning_content or self.reasoning):
            raise refuse("content", "is missing")
        return self

    def translated(self) -> conversation.Message:
        return conversation.Message(
            role=self.role,
            content=self.content or "",
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=tuple(
                conversation.ToolCall(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field({})
    strict: bool = False

    def translated(self) -> conversation.Tool:
        return conversation.Tool(self.name, self.description, self.parameters, self.strict)


class Tool(Strict):
    type: Literal["function"]
    function: Function


def check_names(names: Iterable[str]) -> None:
    """Raises if two tools have one name: calls could not be told apart."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise refuse("tools", f"two tools are called '{name}'")
        seen.add(name)


def check_continued(messages: Sequence[Message], continued: bool, prompted: bool | None) -> None:
    """Raises unless the wish that the answer goes on with the last message can be fulfilled.

    `prompted`: whether the template shall write the head of a new answer.
    """
    if prompted is continued:
        raise refuse("add_generation_prompt", "is the opposite of 'continue_final_message'")
    if continued and (not messages or messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise refuse("continue_final_message", "needs an assistant's message without calls at the end")
