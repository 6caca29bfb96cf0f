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
        self._short_ids = short_ids
        self._events: list[Event] = []
        self._lines: list[str] = []
        self._texts: list[str] = []
        self._texts_region = region
        self._arguments: list[str] = []
        self._calls = 0
        self._in_call = False

    @property
    def in_call(self) -> bool:
        """Whether a call has started that has not ended."""
        return self._in_call

    def text(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            if self._texts_region is not self.region:
                self._flush()
                self._texts_region = self.region
            self._flush_arguments()
            self._texts += [*self._lines, body]
            self._lines.clear()
        if len(body) < len(text):
            self._lines.append(text[len(body) :])

    def drop_lines(self) -> None:
        self._lines.clear()

    def end_lines(self) -> None:
        """The answer ends: line feeds that were kept back are text."""
        if self._lines:
            lines, self._lines = "".join(self._lines), []
            self._flush()
            self._texts_region = self.region
            self._texts.append(lines)

    def start_call(self, name: str) -> None:
        self.drop_lines()
        self._flush()
        call_id = secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        self._events.append(ToolCallStart(self._calls, call_id, name))
        self._in_call = True

    def arguments(self, delta: str) -> None:
        if delta:
            self._arguments.append(delta)

    def end_call(self) -> None:
        self._flush()
        self._events.append(ToolCallEnd(self._calls))
        self._calls += 1
        self._in_call = False

    def abandon_call(self) -> None:
        """The call that has started turned out unreadable: it gets no end, and its number is not used again."""
        self._flush()
        self._calls += 1
        self._in_call = False

    def drain(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._texts:
            text = "".join(self._texts)
            self._texts.clear()
            if self._texts_region is Region.REASONING:
                self._events.append(ReasoningDelta(text))
            else:
                self._events.append(ContentDelta(text))
        self._flush_arguments()

    def _flush_arguments(self) -> None:
        if self._arguments:
            self._events.append(ToolCallArguments(self._calls, "".join(self._arguments)))
            self._arguments.clear()
