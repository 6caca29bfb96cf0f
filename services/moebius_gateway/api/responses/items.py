"""Items, of which requests and responses are made: to messages, and from the parts of an answer."""

import base64
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from moebius_gateway.api.answer import Call, Part, Said, Thought
from moebius_gateway.api.strict import ANYTHING, Many, Strict
from moebius_gateway.api.text_parts import joined
from moebius_gateway.text.conversation import Message, ToolCall

# What items of answers carry, so that they can be sent back as they came.
OURS: dict[str, tuple[Any, ...]] = {"id": (ANYTHING,), "status": (ANYTHING,)}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


Text = Annotated[
    str,
    BeforeValidator(partial(joined, texts=TEXTS), json_schema_input_type=str | list[dict[str, Any]]),
]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    neutral: ClassVar = OURS | {"phase": (ANYTHING,)}


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    arguments: str
    neutral: ClassVar = OURS


class OutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Text
    neutral: ClassVar = OURS


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    summary: Many[ReasoningText] = Field([])
    content: Many[ReasoningText] = Field([])
    encrypted_content: str | None = None
    neutral: ClassVar = OURS

    def text(self) -> str:
        if self.content or self.encrypted_content is None:
            return "".join(part.text for part in self.content or self.summary)
        return base64.b64decode(self.encrypted_content, validate=True).decode()


def decodable(item: Any) -> Any:
    if isinstance(item, ReasoningItem):
        try:
            item.text()
        except ValueError:  # neither base64 nor text
            raise PydanticCustomError("encrypted", "'encrypted_content' is not of this gateway") from None
    return item


def _kind(item: Any) -> str:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given if isinstance(given, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="items are messages, reasoning, function calls and their outputs, and no others",
    ),
]

ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


def conversation_messages(items: Sequence[Any]) -> list[Message]:
    """What an assistant thought, said and called in a row is one message."""
    messages: list[Message] = []
    reasoning = ""
    said: list[str] = []
    calls: list[ToolCall] = []

    def flush() -> None:
        nonlocal reasoning, said, calls
        if reasoning or said or calls:
            messages.append(Message("assistant", "\n".join(said), reasoning, tuple(calls)))
        reasoning, said, calls = "", [], []

    for item in items:
        match item:
            case ReasoningItem():
                if said or calls:
                    flush()
                reasoning += item.text()
            case MessageItem(role="assistant"):
                if calls:
                    flush()
                said.append(item.content)
            case CallItem():
                calls.append(ToolCall(item.call_id, item.name, item.arguments))
            case MessageItem():
                flush()
                messages.append(Message(item.role, item.content))
            case OutputItem():
                flush()
                messages.append(Message("tool", item.output, tool_call_id=item.call_id))
    flush()
    return messages


def conversation_items(output: Sequence[dict[str, Any]]) -> list[Any]:
    """The items of an answer as those that a next request goes back to; a call that was cut short is none."""
    return [ITEM.validate_python(item) for item in output if item["status"] == "completed"]


PREFIXES = {Thought: "rs", Said: "msg", Call: "fc"}


def item_id(part: Part) -> str:
    return f"{PREFIXES[type(part)]}_{secrets.token_hex(24)}"


def item_json(
    part: Part, id_: str, status: str, *, encrypted: bool = False, logprobs: Sequence[Any] = ()
) -> dict[str, Any]:
    """`encrypted`: reasoning also as a text that clients which keep nothing send back."""
    match part:
        case Thought(text):
            content = [{"type": "reasoning_text", "text": text}] if text else []
            item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": content}
            if encrypted:
                item["encrypted_content"] = base64.b64encode(text.encode()).decode()
        case Said(text):
            content = [text_part(text, logprobs)] if text else []
            item = {"type": "message", "role": "assistant", "content": content}
        case Call(call_id, name, arguments, _):
            item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return item | {"id": id_, "status": status}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
