"""An answer in one piece, put together of its deltas: the one form from which every dialect writes it."""

from dataclasses import dataclass, field

from moebius_gateway.text.assembler import AnswerDelta, TextLogprobs
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.types import FinishReason


@dataclass(slots=True)
class Thought:
    text: str


@dataclass(slots=True)
class Said:
    text: str


@dataclass(slots=True)
class Call:
    """`whole`: its arguments are a JSON object; else it was cut short, and is left out of answers."""

    id: str
    name: str
    arguments: str = ""
    whole: bool = False


Part = Thought | Said | Call


@dataclass(slots=True)
class Answer:
    """`parts` in the order in which the model wrote them."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[TextLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None

    def add(self, delta: AnswerDelta) -> None:
        for event in delta.events:
            last = self.parts[-1] if self.parts else None
            match event:
                case ContentDelta(text):
                    if isinstance(last, Said):
                        last.text += text
                    else:
                        self.parts.append(Said(text))
                case ReasoningDelta(text):
                    if isinstance(last, Thought):
                        last.text += text
                    else:
                        self.parts.append(Thought(text))
                case ToolCallStart(_, call_id, name):
                    self.parts.append(Call(call_id, name))
                case ToolCallArguments(index, text):
                    self._started[index].arguments += text
                case ToolCallEnd(index):
                    self._started[index].whole = True
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop

    @property
    def _started(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> list[Call]:
        return [call for call in self._started if call.whole]
