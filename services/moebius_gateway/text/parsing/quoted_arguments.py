"""Arguments as an object like JSON's, but with bare keys, and strings between quotes of more characters."""

import re

from moebius_gateway.text.parsing.json_scanner import MAX_DEPTH, NAMES, NUMBER, inside_string, quoted
from moebius_gateway.text.parsing.output import Output
from moebius_gateway.text.parsing.source import MalformedError, Reading, Source

KEY = re.compile(r"[^:{}\[\],]*")
WORD = re.compile(r"[^{}\[\],]*")
MAX_WORD = 256


def read_quoted(source: Source, out: Output, name: str, quote: str) -> Reading[None]:
    """Strings are passed on as they come. A bare word that is neither number nor name is a string."""
    if (yield from source.peek()) != "{":
        raise MalformedError
    out.start_call(name)
    brackets: list[str] = []
    while True:
        # A value begins here.
        char = yield from source.peek()
        if char in "{[" and len(brackets) < MAX_DEPTH:
            source.take(source.at + 1)
            brackets.append(char)
            out.arguments(char)
            empty = (yield from source.peek()) == _closing(char)
            if not empty and char == "{":
                yield from _key(source, out, quote)
            if not empty:
                continue
        elif (yield from source.accept((quote,), inside=True)):
            yield from _string(source, out, quote)
        else:
            yield from _word(source, out)
        # A value ended here.
        while brackets and (yield from source.peek()) == _closing(brackets[-1]):
            out.arguments(source.take(source.at + 1))
            brackets.pop()
        if not brackets:
            out.end_call()
            return
        if (yield from source.peek()) != ",":
            raise MalformedError
        source.take(source.at + 1)
        out.arguments(", ")
        if brackets[-1] == "{":
            yield from _key(source, out, quote)


def _key(source: Source, out: Output, quote: str) -> Reading[None]:
    yield from source.skip_white()
    if (yield from source.accept((quote,), inside=True)):
        yield from _string(source, out, quote)
    else:
        key = (yield from _bare(source, KEY)).strip().strip('"')
        if not key:
            raise MalformedError
        out.arguments(quoted(key))
    if (yield from source.peek()) != ":":
        raise MalformedError
    source.take(source.at + 1)
    out.arguments(": ")


def _string(source: Source, out: Output, quote: str) -> Reading[None]:
    out.arguments('"')
    yield from source.up_to(quote, lambda piece: out.arguments(inside_string(piece)))
    source.take(source.at + len(quote))
    out.arguments('"')


def _word(source: Source, out: Output) -> Reading[None]:
    word = (yield from _bare(source, WORD)).strip()
    if not word:
        raise MalformedError
    if NUMBER.fullmatch(word):
        out.arguments(word)
    else:
        out.arguments(NAMES.get(word) or quoted(word.strip('"')))


def _bare(source: Source, pattern: re.Pattern[str]) -> Reading[str]:
    """Text up to a delimiter."""
    while True:
        match = pattern.match(source.text, source.at)
        end = match.end() if match else source.at
        if end - source.at > MAX_WORD:
            raise MalformedError
        if end < len(source.text):
            return source.take(end)
        yield from source.more()


def _closing(bracket: str) -> str:
    return "}" if bracket == "{" else "]"
