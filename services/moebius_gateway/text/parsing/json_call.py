"""Calls that are JSON objects, and arguments that are."""

import json
from collections.abc import Collection

from moebius_gateway.text.parsing.json_scanner import JsonScanner
from moebius_gateway.text.parsing.output import Output
from moebius_gateway.text.parsing.source import MalformedError, Reading, Source

NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
OTHER_KEYS = frozenset({"type", "id"})
# Of keys and names, in characters of JSON.
MAX_LENGTH = 256


def read_arguments(source: Source, out: Output, name: str) -> Reading[None]:
    """One call's arguments: an object. Also an object in a string, and null for none."""
    if (yield from source.peek()) == "{":
        out.start_call(name)
        yield from _value(source, out)
        out.end_call()
    else:
        arguments = _object((yield from _value(source, None)))
        _whole_call(out, name, arguments)


def read_json_call(source: Source, out: Output, offered: Collection[str] | None) -> Reading[None]:
    """One call. The source is cleared when the call is whole, before what may follow its arguments.

    `offered`: for a bare call, the names that make it one; see `JsonCall`.
    """
    yield from _expect(source, "{")
    name: str | None = None
    arguments: str | None = None
    whole = False
    while (yield from source.peek()) != "}":
        key = _text((yield from _string(source)))
        yield from _expect(source, ":")
        if key in NAME_KEYS and name is None:
            name = _text((yield from _string(source)))
            if not name or (offered is not None and name not in offered):
                raise MalformedError
        elif key in ARGUMENT_KEYS and not whole and arguments is None:
            if name is None:
                arguments = _object((yield from _value(source, None)))
            else:
                yield from read_arguments(source, out, name)
                whole = True
        elif offered is not None and key not in OTHER_KEYS:
            raise MalformedError
        else:
            yield from _value(source, None)
        if name is not None and arguments is not None and not whole:
            _whole_call(out, name, arguments)
            whole = True
        if whole:
            source.clear()
        if (yield from source.peek()) != "}":
            yield from _expect(source, ",")
    yield from _expect(source, "}")
    if name is None:
        raise MalformedError
    if not whole:
        _whole_call(out, name, "{}")
    source.clear()


def _whole_call(out: Output, name: str, arguments: str) -> None:
    out.start_call(name)
    out.arguments(arguments)
    out.end_call()


def _object(value: str) -> str:
    """The object that a value stands for, as JSON."""
    value = value.strip()
    if value.startswith('"'):
        value = _text(value).strip()
        scanner = JsonScanner()
        end, inner = scanner.read(value, 0)
        if not scanner.done or end < len(value):
            raise MalformedError
        value = inner
    if value == "null":
        return "{}"
    if not value.startswith("{"):
        raise MalformedError
    return value


def _expect(source: Source, char: str) -> Reading[None]:
    if (yield from source.peek()) != char:
        raise MalformedError
    source.take(source.at + 1)


def _string(source: Source) -> Reading[str]:
    if (yield from source.peek()) != '"':
        raise MalformedError
    return (yield from _value(source, None, MAX_LENGTH))


def _text(string: str) -> str:
    """What a JSON string says."""
    text: str = json.loads(string)
    return text


def _value(source: Source, out: Output | None, limit: int | None = None) -> Reading[str]:
    """One JSON value, given to `out` as it comes, or returned. `limit`: of its length."""
    scanner = JsonScanner()
    parts: list[str] = []
    length = 0
    while True:
        text = source.text if limit is None else source.text[: source.at + limit - length]
        end, part = scanner.read(text, source.at)
        length += len(source.take(end))
        if out is not None:
            out.arguments(part)
        else:
            parts.append(part)
        if scanner.done:
            return "".join(parts)
        if scanner.failed or length == limit:
            raise MalformedError
        yield from source.more()
