"""Collects the events of one feed, and keeps line feeds back until it is clear that they are text."""

import secrets

from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.parsing.spec import Region


class Output:
    """Line feeds next to a marker belong to the marker: `drop_lines` when one was read."""

    def __init__(self, region: Region, *, short_ids: bool) -> None:
        self.region = region
        # Whether a call has started that has not ended.
        self.in_call = False
        self.whole_calls = 0
        self._short_ids = short_ids
        self._calls = 0
        self._events: list[Event] = []
        self._lines: list[str] = []
        # Pieces of one delta: text of a region, or (None) arguments.
        self._pieces: list[str] = []
        self._kind: Region | None = None

    def text(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            self._add(self.region, *self._lines, body)
            self._lines.clear()
        if len(body) < len(text):
            self._lines.append(text[len(body) :])

    @property
    def is_empty(self) -> bool:
        """Nothing is kept back, and nothing has been collected."""
        return not (self._lines or self._pieces or self._events)

    def plain(self, text: str) -> Event:
        """Text of the region as an event of its own, where nothing else is collected."""
        return ReasoningDelta(text) if self.region is Region.REASONING else ContentDelta(text)

    def hold(self, text: str) -> None:
        """Text that is dropped if a marker follows."""
        self._lines.append(text)

    def drop_lines(self) -> None:
        self._lines.clear()

    def end_lines(self) -> None:
        """The answer ends: line feeds that were kept back are text."""
        self._add(self.region, *self._lines)
        self._lines.clear()

    def start_call(self, name: str) -> None:
        self.drop_lines()
        self._flush()
        call_id = secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        self._events.append(ToolCallStart(self._calls, call_id, name))
        self.in_call = True

    def arguments(self, delta: str) -> None:
        self._add(None, delta)

    def end_call(self) -> None:
        self._flush()
        self._events.append(ToolCallEnd(self._calls))
        self.whole_calls += 1
        self._calls += 1
        self.in_call = False

    def abandon_call(self) -> None:
        """The call that has started is unreadable: it gets no end, and its number is not used again."""
        self._flush()
        self._calls += 1
        self.in_call = False

    def drain(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: Region | None, *pieces: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces += pieces

    def _flush(self) -> None:
        joined = "".join(self._pieces)
        self._pieces.clear()
        if not joined:
            return
        if self._kind is None:
            self._events.append(ToolCallArguments(self._calls, joined))
        elif self._kind is Region.REASONING:
            self._events.append(ReasoningDelta(joined))
        else:
            self._events.append(ContentDelta(joined))
