"""Reads a text with a family's parser, and checks what holds for any text."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.parsing.registry import by_name
from moebius_gateway.text.parsing.stream import parser_for

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "limits": {"type": "object"},
            "kinds": {"type": "array", "items": {"type": "string"}},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Call:
    name: str
    arguments: str = ""
    ended: bool = False


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def whole_calls(self) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.calls if call.ended]


def events_of(
    family: str,
    pieces: Iterable[str],
    *,
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
    started_in_reasoning: bool = False,
    truncated: bool = False,
) -> list[Event]:
    parser = parser_for(by_name(family), tools, started_in_reasoning=started_in_reasoning)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish(truncated=truncated)


def answer_of(events: Sequence[Event]) -> Answer:
    """Joins deltas; fails if their order is none that a client can follow."""
    answer = Answer()
    ids = set()
    for event in events:
        match event:
            case ReasoningDelta(text):
                assert text
                answer.reasoning += text
            case ContentDelta(text):
                assert text
                answer.content += text
            case ToolCallStart(index, id, name):
                assert index == len(answer.calls)
                assert name
                assert id not in ids
                ids.add(id)
                answer.calls.append(Call(name))
            case ToolCallArguments(index, delta):
                assert delta
                assert index == len(answer.calls) - 1
                assert not answer.calls[index].ended
                answer.calls[index].arguments += delta
            case ToolCallEnd(index):
                assert index == len(answer.calls) - 1
                assert not answer.calls[index].ended
                answer.calls[index].ended = True
                assert isinstance(json.loads(answer.calls[index].arguments), dict)
    return answer


def read(family: str, pieces: Iterable[str], **how: Any) -> Answer:
    return answer_of(events_of(family, pieces, **how))
