"""Content as a list of parts, of which these models read text only: to one text."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

# What parts of answers and of other APIs carry beside their text, and what changes nothing.
BESIDE = frozenset({"type", "annotations", "logprobs", "cache_control"})


def joined(content: Any, texts: Mapping[str, str]) -> Any:
    """Each part to a line of its own; what is no list is left as it is.

    `texts`: the types that parts may have, each with the key of its text. Raises `PydanticCustomError`.
    """
    if not isinstance(content, list):
        return content
    return "\n".join(_text(part, texts) for part in content)


def _text(part: Any, texts: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("content_part", "a content part is an object with a 'type'")
    if kind not in texts:
        raise PydanticCustomError(
            "content_part", "this model is served text-only: it takes no {kind}", {"kind": repr(kind)}
        )
    key = texts[kind]
    if not isinstance(part.get(key), str) or not part.keys() <= BESIDE | {key}:
        message = "a part of this type has the keys 'type' and '{key}', and no other"
        raise PydanticCustomError("content_part", message, {"key": key})
    text: str = part[key]
    return text
