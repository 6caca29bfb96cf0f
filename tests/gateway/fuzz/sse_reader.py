"""A reader of server-sent events, written from the standard (WHATWG HTML, 9.2.6), not from our writer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

FIELDS = frozenset({"event", "data", "id", "retry"})


@dataclass(frozen=True)
class ServerEvent:
    name: str
    data: str


def read_events(stream: bytes) -> Iterator[ServerEvent]:
    """Raises if the stream is no UTF-8, ends within an event, or has a field that nobody knows."""
    text = stream.decode("utf-8")
    *lines, rest = re.split("\r\n|\n|\r", text)
    assert not rest, f"the stream ends within a line: {rest!r}"
    name, data = "", list[str]()
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        if not field:
            continue  # a comment
        assert field in FIELDS, f"unknown field {field!r}"
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
    assert not data, "the stream ends within an event"
    assert not name, "an event without data"
