"""A chat as every dialect translates it and every chat template gets it: messages, tools, reasoning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text that the model wrote, in general a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`reasoning` and `tool_calls` are an assistant's; `tool_call_id` says what a tool answers."""

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `strict`: its arguments must match `parameters`, a JSON schema."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked of the model.

    `effort` ("none" to "max") and `thinking` (on or off) say how much it shall reason; None: as it likes.
    `template_variables` are the client's own, for the chat template. `continued`: the last message is the
    assistant's, and the answer goes on with it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    effort: str | None = None
    thinking: bool | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False

    def characters(self) -> int:
        """About how long the prompt will be."""
        said = sum(len(m.content) + len(m.reasoning) + len(m.name or "") for m in self.messages)
        called = sum(len(call.arguments) for m in self.messages for call in m.tool_calls)
        return said + called + sum(512 + len(tool.description or "") for tool in self.tools)
