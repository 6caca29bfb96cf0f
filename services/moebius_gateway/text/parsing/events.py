"""What a model's answer is made of, once its markers have been read.

An event's `size` is how many characters of the answer it brings. Nobody changes an event. None is frozen,
since frozen ones take twice as long to make.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str

    @property
    def size(self) -> int:
        return len(self.text)


@dataclass(slots=True)
class ContentDelta:
    """More of what the model says."""

    text: str

    @property
    def size(self) -> int:
        return len(self.text)


@dataclass(slots=True)
class ToolCallStart:
    """A tool call begins. `index` counts the calls of one answer from 0; `id` is unique among all answers."""

    size: ClassVar[int] = 0
    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolCallArguments:
    """More of a call's arguments. The deltas of a call, joined, are a JSON object once it has ended."""

    index: int
    delta: str

    @property
    def size(self) -> int:
        return len(self.delta)


@dataclass(slots=True)
class ToolCallEnd:
    """The call is whole: its arguments are a JSON object.

    A call that started and has no end was cut short, or became unreadable on the way (then its text follows
    as content, or as reasoning where it stood there). An answer that is given in one piece leaves it out.
    """

    size: ClassVar[int] = 0
    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
