"""Content blocks of Anthropic's messages, as clients send them, translated to messages of a conversation."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from moebius_gateway.api.strict import ANYTHING, Many, Strict
from moebius_gateway.text.conversation import Message, ToolCall

# Prefixes are cached without being asked to.
CACHE: dict[str, tuple[Any, ...]] = {"cache_control": (ANYTHING,)}


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    neutral: ClassVar = CACHE | {"citations": ([],)}


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    input: dict[str, Any]
    neutral: ClassVar = CACHE | {"caller": (ANYTHING,)}


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[
    Many[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | Many[TextBlock])
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field([])
    is_error: bool = False
    neutral: ClassVar = CACHE

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        return _text_only(value)


def _text_only(value: Any) -> Any:
    for block in value if isinstance(value, list) else []:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("image", "document"):
            raise PydanticCustomError(
                "content_block", "this model is served text-only: it takes no {kind}", {"kind": repr(kind)}
            )
        if kind == "redacted_thinking":
            raise PydanticCustomError("content_block", "redacted thinking cannot be read here: leave it out")
    return value


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class BlockMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Many[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | Many[Block])]

    @field_validator("content", mode="before")
    @classmethod
    def _served(cls, value: Any) -> Any:
        return _text_only(value)

    @field_validator("content")
    @classmethod
    def _of_its_role(cls, blocks: list[Block], info: Any) -> list[Block]:
        allowed = {
            "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
            "user": (TextBlock, ToolResultBlock),
            "system": (TextBlock,),
        }.get(info.data.get("role"), ())
        for block in blocks:
            if not isinstance(block, allowed):
                raise PydanticCustomError(
                    "content_block",
                    "a {role} has no {type} blocks",
                    {"role": info.data.get("role"), "type": block.type},
                )
        return blocks

    def translated(self) -> Iterator[Message]:
        """An assistant's blocks are one message; a tool's results are messages of their own."""
        if self.role == "assistant":
            yield Message(
                "assistant",
                joined([block for block in self.content if isinstance(block, TextBlock)]),
                reasoning="".join(b.thinking for b in self.content if isinstance(b, ThinkingBlock)),
                tool_calls=tuple(
                    ToolCall(block.id, block.name, orjson.dumps(block.input).decode())
                    for block in self.content
                    if isinstance(block, ToolUseBlock)
                ),
            )
            return
        said: list[TextBlock] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                said.append(block)
            elif isinstance(block, ToolResultBlock):
                if said:
                    yield Message(self.role, joined(said))
                    said = []
                text = ("Error: " if block.is_error else "") + joined(block.content)
                yield Message("tool", text, tool_call_id=block.tool_use_id)
        if said or not self.content:
            yield Message(self.role, joined(said))


def joined(blocks: list[TextBlock]) -> str:
    """Each block begins a line of its own."""
    return "\n".join(block.text for block in blocks)
