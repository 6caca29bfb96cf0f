"""Arguments as tags in tags, whose bare values get their types from the tool's schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moebius_gateway.text.parsing.json_scanner import MAX_DEPTH, inside_string, quoted
from moebius_gateway.text.parsing.output import Output
from moebius_gateway.text.parsing.schema import argument_types, typed
from moebius_gateway.text.parsing.source import MalformedError, Reading, Source
from moebius_gateway.text.parsing.spec import NestedArguments
from moebius_gateway.text.parsing.templates import compiled

STRING = frozenset({"string"})


@dataclass(slots=True)
class _Container:
    """An object or a list that is open."""

    # Its key in its own container; None in a list.
    step: str | None
    closing_tag: str
    types: frozenset[str]
    # What closes it in JSON. Its first part decides.
    bracket: str = ""


def read_nested(
    source: Source, out: Output, name: str, format: NestedArguments, schema: Mapping[str, Any]
) -> Reading[None]:
    """Strings are passed on as they come; other values when they are whole."""
    opening = [(compiled(f"{format.mark}<{{key}}>"), None)]
    stack = [_Container(None, format.mark + format.end, frozenset({"object"}))]
    while stack:
        container = stack[-1]
        yield from source.skip_white()
        if (yield from source.accept((container.closing_tag,), inside=True)):
            if not out.in_call:
                out.start_call(name)
            out.arguments(container.bracket or "{}")
            stack.pop()
            continue
        match, _ = yield from source.match(opening)
        if not out.in_call:
            out.start_call(name)
        tag = match["key"]
        if container.bracket:
            out.arguments(", ")
        else:
            container.bracket = "]" if tag == format.item and "array" in container.types else "}"
            out.arguments("[" if container.bracket == "]" else "{")
        step = None
        if container.bracket == "}":
            step = tag
            out.arguments(f"{quoted(tag)}: ")
        elif tag != format.item:
            raise MalformedError
        types = argument_types(schema, *(outer.step for outer in stack[1:]), step)
        closing_tag = f"{format.mark}</{tag}>"
        if not (yield from _value(source, out, format.mark, closing_tag, types)):
            if len(stack) == MAX_DEPTH:
                raise MalformedError
            stack.append(_Container(step, closing_tag, types))
    out.end_call()


def _value(source: Source, out: Output, mark: str, closing_tag: str, types: frozenset[str]) -> Reading[bool]:
    """Reads a bare value with its closing tag; False, if tags of parts stand in its place."""
    if types == STRING:
        out.arguments('"')
        yield from source.up_to(mark, lambda piece: out.arguments(inside_string(piece)))
        out.arguments('"')
    else:
        pieces: list[str] = []
        yield from source.up_to(mark, pieces.append)
        text = "".join(pieces)
    if (yield from source.accept((closing_tag,), inside=True)):
        if types != STRING:
            out.arguments(typed(text, types) if text.strip() else _empty(text, types))
        return True
    if types == STRING or text.strip():
        raise MalformedError
    return False


def _empty(text: str, types: frozenset[str]) -> str:
    """What white space, or nothing, between two tags means."""
    if "string" in types or not types & {"array", "object"}:
        return quoted(text)
    return "[]" if "array" in types else "{}"
