"""Messages in the spelling that a chat template understands: templates differ, clients need not know."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from moebius_gateway.text.conversation import Message

# Mistral's templates refuse ids of any other length.
SHORT_ID = re.compile(r"length\s*(?:!=|==)\s*9\b")
SHORT_ID_LENGTH = 9


class MessageWriter:
    """Knows of one template, by its text, what its messages must look like."""

    def __init__(self, source: str) -> None:
        # Most templates know only the older name of the role.
        self._knows_developer = "developer" in source
        self._short_ids = SHORT_ID.search(source) is not None
        # Where the template looks for an assistant's reasoning.
        self._reasoning_keys = [
            key for key in ("reasoning_content", "reasoning", "thinking") if key in source
        ]

    def spellings(self, messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
        """Ways to write them, the usual one first; each next is for templates that refuse the one before."""
        yield self._written(messages)
        if any(message.tool_calls for message in messages):
            yield self._written(messages, text_arguments=True)
        if (hoisted := _hoisted(messages)) != list(messages):
            yield self._written(hoisted)
            yield self._written(hoisted, text_arguments=True)

    def _written(self, messages: Sequence[Message], *, text_arguments: bool = False) -> list[dict[str, Any]]:
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        return [self._message(message, names, text_arguments) for message in messages]

    def _message(self, message: Message, names: dict[str, str], text_arguments: bool) -> dict[str, Any]:
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        written: dict[str, Any] = {"role": role, "content": message.content}
        if message.reasoning:
            written |= dict.fromkeys(self._reasoning_keys, message.reasoning)
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": self._id(call.id),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if text_arguments else _parsed(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        name = message.name
        if message.tool_call_id is not None:
            written["tool_call_id"] = self._id(message.tool_call_id)
            name = name or names.get(message.tool_call_id)
        return written if name is None else written | {"name": name}

    def _id(self, given: str) -> str:
        if not self._short_ids or (len(given) == SHORT_ID_LENGTH and given.isalnum()):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:SHORT_ID_LENGTH]


def _parsed(arguments: str) -> Any:
    """Templates want an object; what is none (a call that was cut off) stays text."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _hoisted(messages: Sequence[Message]) -> list[Message]:
    """With all that the system says in one message at the front."""
    system = [message for message in messages if message.role in ("system", "developer")]
    if not system:
        return list(messages)
    merged = Message("system", "\n\n".join(message.content for message in system))
    return [merged, *(message for message in messages if message.role not in ("system", "developer"))]
