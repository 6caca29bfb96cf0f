"""From the tokens of a generation to the answer that a client gets: text, reasoning, tool calls."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moebius_gateway.text.detokenizer import Detokenizer
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
)
from moebius_gateway.text.parsing.stream import StreamParser
from moebius_gateway.text.stop import StopMatcher
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason, TokenLogprobs, Tokens


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """A token's log probabilities, and where in the answer (in characters, markers left out) it begins."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(slots=True)
class AnswerDelta:
    """What an answer goes on with. With a finish reason it is the last. Not frozen: see `Tokens`.

    `stop` is the stop string that ended it, if one did.
    """

    events: tuple[Event, ...]
    logprobs: tuple[TextLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None


class AnswerAssembler:
    """Detokenizes one generation, reads its markers and ends it at a stop string.

    Stop strings are looked for in what the model says, neither in its reasoning nor in its calls, and not in
    the first `min_tokens` tokens. A token's log probabilities are delivered with the first of its characters
    (those of a token without any, with the next ones). Those of the stop token, and of tokens whose text lies
    after a stop string, are not.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        parser: StreamParser | None = None,
        *,
        one_call: bool = False,
    ) -> None:
        """Without a parser all text is what the model says. `one_call`: the answer ends after the first."""
        self._detokenizer = Detokenizer(token_bytes)
        self._parser = parser
        self._stop = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._one_call = one_call
        # Characters that were read so far, and those of them that were delivered.
        self._read = 0
        self._delivered = 0
        self._waiting: deque[TextLogprobs] = deque()
        self._reasoning = False
        self.generated_tokens = 0
        self.reasoning_tokens = 0

    def push(self, tokens: Tokens) -> AnswerDelta:
        """Takes the next tokens. After a delta with a finish reason the generation is of no further use."""
        events: list[Event] = []
        for i, token_id in enumerate(tokens.token_ids):
            self.generated_tokens += 1
            if token_id in self._stop_token_ids:  # the end, though the finish reason may come later
                break
            if tokens.logprobs:
                self._waiting.append(TextLogprobs(token_id, self._read, tokens.logprobs[i]))
            if self._take(self._detokenizer.push(token_id), events):
                return self._deliver(events, FinishReason.STOP, everything=False)
            self.reasoning_tokens += self._reasoning
        if tokens.finish_reason is None:
            return self._deliver(events, None, everything=False)
        ended = self._take(self._detokenizer.flush(), events)
        if not ended and self._parser is not None:
            ended = self._accept(
                self._parser.finish(truncated=tokens.finish_reason is FinishReason.LENGTH), events
            )
        if ended:
            return self._deliver(events, FinishReason.STOP, everything=False)
        self._emit(ContentDelta(self._stop.flush()), events)
        return self._deliver(events, tokens.finish_reason, everything=True)

    def _take(self, text: str, events: list[Event]) -> bool:
        """Reads more text; says whether the answer ends with it."""
        if not text:
            return False
        if self._parser is None:
            self._read += len(text)
            return self._say(text, events)
        return self._accept(self._parser.feed(text), events)

    def _accept(self, parsed: Sequence[Event], events: list[Event]) -> bool:
        for event in parsed:
            self._read += event.size
            self._reasoning = isinstance(event, ReasoningDelta)
            if isinstance(event, ContentDelta):
                if self._say(event.text, events):
                    return True
                continue
            self._emit(ContentDelta(self._stop.flush()), events)
            self._emit(event, events)
            if self._one_call and isinstance(event, ToolCallEnd):
                return True
        return False

    def _say(self, text: str, events: list[Event]) -> bool:
        """Delivers what can be no part of a stop string; says whether one was completed."""
        if self.generated_tokens <= self._min_tokens:
            self._emit(ContentDelta(text), events)
            return False
        deliverable, stopped = self._stop.push(text)
        self._emit(ContentDelta(deliverable), events)
        return stopped

    def _emit(self, event: Event, events: list[Event]) -> None:
        """Adds to `events`; deltas of one kind that come together are one."""
        self._delivered += event.size
        if event.size and not events:  # most of the time
            events.append(event)
            return
        match event, events[-1] if events else None:
            case ((ContentDelta() | ReasoningDelta() | ToolCallArguments()), _) if not event.size:
                return
            case ContentDelta(text), ContentDelta(before):
                events[-1] = ContentDelta(before + text)
            case ReasoningDelta(text), ReasoningDelta(before):
                events[-1] = ReasoningDelta(before + text)
            case ToolCallArguments(index, delta), ToolCallArguments(same, before) if index == same:
                events[-1] = ToolCallArguments(index, before + delta)
            case _:
                events.append(event)

    def _deliver(
        self, events: list[Event], finish_reason: FinishReason | None, *, everything: bool
    ) -> AnswerDelta:
        ready = []
        while self._waiting and (everything or self._waiting[0].offset < self._delivered):
            ready.append(self._waiting.popleft())
        return AnswerDelta(tuple(events), tuple(ready), finish_reason, self._stop.found)
