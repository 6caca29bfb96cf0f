"""What a model's answer is made of, once its markers have been read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. `index` counts the calls of one answer from 0; `id` is unique among all answers."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. The deltas of a call, joined, are a JSON object once it has ended."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is whole: its arguments are a JSON object.

    A call that started and has no end was cut short, or became unreadable on the way (then its text follows
    as content, or as reasoning where it stood there). An answer that is given in one piece leaves it out.
    """

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
