"""Arguments as pairs of tags around bare values, which get their types from the tool's schema."""

from collections.abc import Callable, Mapping
from typing import Any

from moebius_gateway.text.parsing.json_scanner import JsonScanner, inside_string, quoted
from moebius_gateway.text.parsing.output import Output
from moebius_gateway.text.parsing.schema import JSON_TYPES, argument_types, typed
from moebius_gateway.text.parsing.source import Reading, Source
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
        out.arguments(f"{'{' if first else ', '}{quoted(groups['key'])}: ")
        if types == STRING:
            out.arguments('"')
            yield from _value(source, format, lambda piece: out.arguments(inside_string(piece)))
            out.arguments('"')
        else:
            bare = _BareValue()
            yield from _value(source, format, bare)
            while "string" not in types and bare.in_string:
                bare(format.close)
                yield from _value(source, format, bare)
            out.arguments(typed("".join(bare.pieces), types))


def _value(source: Source, format: TaggedArguments, give: Callable[[str], None]) -> Reading[None]:
    """The text up to the closing tag, in pieces."""
    yield from source.up_to(format.close, _WithoutLines(give) if format.lines else give)
    source.take(source.at + len(format.close))


class _BareValue:
    """Text that comes in pieces."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._scanner = JsonScanner()

    def __call__(self, piece: str) -> None:
        self.pieces.append(piece)
        self._scanner.read(piece, 0)

    @property
    def in_string(self) -> bool:
        """A string of an object or a list goes on: what looks like the closing tag is said in it."""
        return self._scanner.in_string


class _WithoutLines:
    """Leaves out a line feed at the beginning of a text that comes in pieces, and one at its end."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._begun = False
        self._held = ""

    def __call__(self, piece: str) -> None:
        if not piece:
            return
        if not self._begun:
            self._begun = True
            piece = piece.removeprefix("\n")
        piece = self._held + piece
        self._held = "\n" if piece.endswith("\n") else ""
        self._give(piece.removesuffix("\n"))
