"""Arguments as pairs of tags around bare values, which get their types from the tool's schema."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from moebius_gateway.text.parsing.output import Output
from moebius_gateway.text.parsing.schema import JSON_TYPES, argument_types, typed
from moebius_gateway.text.parsing.source import Reading, Source, markers
from moebius_gateway.text.parsing.spec import TaggedArguments
from moebius_gateway.text.parsing.templates import compiled

STRING = frozenset({"string"})


def read_tagged(
    source: Source, out: Output, name: str, format: TaggedArguments, schema: Mapping[str, Any]
) -> Reading[None]:
    """Strings are passed on as they come; other values when they are whole."""
    patterns = [(compiled(format.end), True), (compiled(format.argument), False)]
    while True:
        yield from source.skip_white()
        match, end = yield from source.match(patterns)
        first = not out.in_call
        if first:
            out.start_call(name)
        if end:
            out.arguments("{}" if first else "}")
            out.end_call()
            return
        groups = match.groupdict()
        types = argument_types(schema, groups["key"])
        if "word" in groups:
            types = STRING if groups["word"] == "true" else JSON_TYPES - STRING
        out.arguments(f"{'{' if first else ', '}{_quoted(groups['key'])}: ")
        if types == STRING:
            out.arguments('"')
            yield from _value(source, format, lambda piece: out.arguments(_quoted(piece)[1:-1]))
            out.arguments('"')
        else:
            pieces: list[str] = []
            yield from _value(source, format, pieces.append)
            out.arguments(typed("".join(pieces), types))


def _value(source: Source, format: TaggedArguments, give: Callable[[str], None]) -> Reading[None]:
    """The text up to the closing tag, in pieces."""
    closing = markers(frozenset({format.close}))
    first, line = format.lines, ""
    while True:
        start, end = closing.find(source.text, source.at)
        piece = line + source.take(start)
        line = ""
        if first and piece:
            piece, first = piece.removeprefix("\n"), False
        if format.lines and piece.endswith("\n"):
            piece, line = piece[:-1], "\n"
        give(piece)
        if end > start:
            source.take(end)
            return
        yield from source.more()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
