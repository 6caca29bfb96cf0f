"""Checks JSON as it comes, so that what is passed on is the beginning of valid JSON at any time."""

import json
import re
from enum import Enum, auto

WHITE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
LITERAL = re.compile(r'[^\s,:{}\[\]"]*')
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
# Models that were trained on much Python write its names.
NAMES = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}
# Clients cannot read what nests much deeper.
MAX_DEPTH = 256


class _State(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    NEXT = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    DONE = auto()
    FAILED = auto()


class JsonScanner:
    """Reads one JSON value in pieces.

    It mends what has only one meaning: control characters in strings, a backslash before a character that
    needs none, half a character, Python's True, False and None. Anything else that is not JSON makes it fail.
    """

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._stack: list[str] = []
        self._in_key = False
        # Digits of an escape; one that is the first half of a character, until the other has come.
        self._hex = ""
        self._high = ""
        self._literal: list[str] = []

    @property
    def done(self) -> bool:
        """The value is whole."""
        return self._state is _State.DONE

    @property
    def failed(self) -> bool:
        """What comes next is not JSON; nothing more is read."""
        return self._state is _State.FAILED

    @property
    def in_string(self) -> bool:
        """A string of an object or a list has begun that has not ended."""
        return bool(self._stack) and self._state in (_State.STRING, _State.ESCAPE, _State.HEX)

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Reads on from `text[at:]`. Returns how far it read, and that part as JSON.

        It stops early only behind the value, and where it fails. A number or name is kept until what follows
        shows that it is whole.
        """
        out: list[str] = []
        while at < len(text) and not (self.done or self.failed):
            if self._state is _State.STRING:
                at = self._string(text, at, out)
            elif self._state is _State.ESCAPE:
                char = text[at]
                if char == "u":
                    self._state = _State.HEX
                else:
                    self._half(out)
                    out.append("\\" + char if char in '"\\/bfnrt' else "\\\\" + inside_string(char))
                    self._state = _State.STRING
                at += 1
            elif self._state is _State.HEX:
                at = self._hex_digit(text, at, out)
            elif self._state is _State.LITERAL:
                at = self._rest_of_literal(text, at, out)
            else:
                at = self._structure(text, at, out)
        return at, "".join(out)

    def _hex_digit(self, text: str, at: int, out: list[str]) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            self._state = _State.FAILED
            return at
        self._hex += text[at]
        if len(self._hex) == 4:
            unit, self._hex = self._hex, ""
            self._state = _State.STRING
            if self._high and 0xDC00 <= int(unit, 16) < 0xE000:
                out.append(f"\\u{self._high}\\u{unit}")
                self._high = ""
                return at + 1
            self._half(out)
            if 0xD800 <= int(unit, 16) < 0xDC00:
                self._high = unit
            else:
                out.append(r"\ufffd" if 0xDC00 <= int(unit, 16) < 0xE000 else f"\\u{unit}")
        return at + 1

    def _half(self, out: list[str]) -> None:
        """The first half of a character, if there was one, stays alone."""
        if self._high:
            out.append(r"\ufffd")
            self._high = ""

    def _string(self, text: str, at: int, out: list[str]) -> int:
        match = PLAIN.match(text, at)
        end = match.end() if match else at
        if end > at:
            self._half(out)
        out.append(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char != "\\":
            self._half(out)
        if char == '"':
            out.append(char)
            self._state = _State.COLON if self._in_key else self._behind_value()
            self._in_key = False
        elif char == "\\":
            self._state = _State.ESCAPE
        else:
            out.append(inside_string(char))
        return end + 1

    def _rest_of_literal(self, text: str, at: int, out: list[str]) -> int:
        match = LITERAL.match(text, at)
        end = match.end() if match else at
        self._literal.append(text[at:end])
        if end == len(text):
            return end
        literal = "".join(self._literal)
        self._literal.clear()
        if literal in NAMES or NUMBER.fullmatch(literal):
            out.append(NAMES.get(literal, literal))
            self._state = self._behind_value()
        else:
            self._state = _State.FAILED
        return end

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        match = WHITE.match(text, at)
        end = match.end() if match else at
        out.append(text[at:end])
        if end == len(text):
            return end
        char, state = text[end], self._state
        value = state in (_State.VALUE, _State.FIRST_ITEM)
        if char == '"' and (value or state in (_State.KEY, _State.FIRST_KEY)):
            self._in_key = not value
            self._state = _State.STRING
        elif char in "{[" and value and len(self._stack) < MAX_DEPTH:
            self._stack.append(char)
            self._state = _State.FIRST_KEY if char == "{" else _State.FIRST_ITEM
        elif char in "}]" and self._closes(char):
            self._stack.pop()
            self._state = self._behind_value()
        elif char == ":" and state is _State.COLON:
            self._state = _State.VALUE
        elif char == "," and state is _State.NEXT:
            self._state = _State.KEY if self._stack[-1] == "{" else _State.VALUE
        elif value and char in "-0123456789tfnTFN":
            self._state = _State.LITERAL
            return end
        else:
            self._state = _State.FAILED
            return end
        out.append(char)
        return end + 1

    def _closes(self, bracket: str) -> bool:
        opening, empty = ("{", _State.FIRST_KEY) if bracket == "}" else ("[", _State.FIRST_ITEM)
        return self._state is empty or (self._state is _State.NEXT and self._stack[-1] == opening)

    def _behind_value(self) -> _State:
        return _State.NEXT if self._stack else _State.DONE


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inside_string(text: str) -> str:
    """`text` as it stands in a JSON string."""
    return quoted(text)[1:-1]
