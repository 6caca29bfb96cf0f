"""The text that has come and is not read yet, for readers that are written as generators.

A reader yields when it needs more text. What it leaves unread is bounded (the beginning of a marker), so a
piece costs what its own length costs.
"""

import re
from collections.abc import Callable, Collection, Generator, Sequence
from functools import cache
from typing import TypeVar

from moebius_gateway.text.parsing.templates import Pattern

T = TypeVar("T")
Reading = Generator[None, None, T]
WHITE = re.compile(r"\s*")


class MalformedError(Exception):
    """What stands here is not what the format says."""


class EndOfTextError(MalformedError):
    """The text ended where more was due."""


class Source:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        # What was taken since the last `clear`; what is to be given back if it turns out malformed.
        self._taken: list[str] = []

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        piece = self.text[self.at : end]
        self.at = end
        self._taken.append(piece)
        return piece

    def clear(self) -> None:
        self._taken.clear()

    def taken(self) -> str:
        return "".join(self._taken)

    def more(self) -> Reading[None]:
        """Waits for more text. Raises `EndOfTextError`."""
        if self.ended:
            raise EndOfTextError
        yield

    def skip_white(self) -> Reading[None]:
        """Takes white space up to the next other character, or the end."""
        while True:
            self.take(_end(WHITE, self.text, self.at))
            if self.at < len(self.text) or self.ended:
                return
            yield

    def peek(self) -> Reading[str]:
        """The next character that is not white space, not taken yet."""
        yield from self.skip_white()
        if self.at == len(self.text):
            raise EndOfTextError
        return self.text[self.at]

    def match(self, patterns: Sequence[tuple[Pattern, T]]) -> Reading[tuple[re.Match[str], T]]:
        """Takes the first pattern that matches here. One that still could is waited for.

        Raises `MalformedError` when none can any more; then nothing was taken.
        """
        while True:
            for pattern, value in patterns:
                if match := pattern.full.match(self.text, self.at):
                    self.take(match.end())
                    return match, value
                if pattern.partial.fullmatch(self.text, self.at):
                    break
            else:
                raise MalformedError
            yield from self.more()

    def up_to(self, literal: str, give: Callable[[str], None]) -> Reading[None]:
        """Gives the text before `literal` as it comes, and leaves the literal."""
        finder = markers(frozenset({literal}))
        while True:
            start, end = finder.find(self.text, self.at)
            give(self.take(start))
            if end > start:
                return
            yield from self.more()

    def accept(self, literals: Collection[str], *, inside: bool = False) -> Reading[str | None]:
        """Takes one of `literals`, if one comes next.

        `inside`: of something that is not whole, so that the end of the text in a literal is an error.
        """
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    self.take(self.at + len(literal))
                    return literal
            rest = self.text[self.at :]
            if not any(literal.startswith(rest) for literal in literals):
                return None
            if self.ended and not inside:
                return None
            yield from self.more()


class Markers:
    """Finds literal markers in text, of which none is the beginning of another."""

    def __init__(self, markers: Collection[str]) -> None:
        self.markers = frozenset(markers)
        self._whole = re.compile("|".join(map(re.escape, sorted(markers))) or "(?!)")
        self._partial = re.compile(_beginnings(markers) or r"\Z")

    def find(self, text: str, start: int) -> tuple[int, int]:
        """Where the next marker begins and ends.

        An empty one means none: it stands where the end of the text could be the beginning of one.
        """
        if match := self._whole.search(text, start):
            return match.span()
        match = self._partial.search(text, start)
        end = match.start() if match else len(text)
        return end, end


@cache
def markers(literals: frozenset[str]) -> Markers:
    return Markers(literals)


def _beginnings(markers: Collection[str]) -> str:
    """An expression for the beginnings of `markers` at the end of a text."""
    alternatives = []
    for marker in markers:
        expression = ""
        for char in reversed(marker[1:-1]):
            expression = rf"(?:{re.escape(char)}{expression})?"
        if marker:
            alternatives.append(re.escape(marker[0]) + expression)
    return rf"(?:{'|'.join(alternatives)})\Z" if alternatives else ""


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
