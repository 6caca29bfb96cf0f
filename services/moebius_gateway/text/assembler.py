"""From the tokens of a generation to the text that a client gets."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moebius_gateway.text.detokenizer import Detokenizer
from moebius_gateway.text.stop import StopMatcher
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason, TokenLogprobs, Tokens


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """A token's log probabilities, and where in the text of the answer (in characters) the token begins."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer. With a finish reason it is the last."""

    text: str
    logprobs: tuple[TextLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class TextAssembler:
    """Detokenizes one generation and ends it at a stop string.

    A token's log probabilities are delivered with the first of its characters (those of a token that
    completes no character, with the character it belongs to). Those of the stop token, and of tokens whose
    text lies after a stop string, are not. Stop strings are not looked for in the first `min_tokens` tokens.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stop = StopMatcher(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._decoded = 0
        self._delivered = 0
        self._waiting: deque[TextLogprobs] = deque()
        self.generated_tokens = 0

    def push(self, tokens: Tokens) -> TextDelta:
        """Takes the next tokens. After a delta with a finish reason the generation is of no further use."""
        parts: list[str] = []
        for i, token_id in enumerate(tokens.token_ids):
            self.generated_tokens += 1
            if token_id in self._stop_token_ids:  # the end, though the finish reason may come later
                break
            if tokens.logprobs:
                self._waiting.append(TextLogprobs(token_id, self._decoded, tokens.logprobs[i]))
            if self._append(self._detokenizer.push(token_id), parts):
                return self._deliver(parts, FinishReason.STOP, everything=False)
        if tokens.finish_reason is None:
            return self._deliver(parts, None, everything=False)
        if self._append(self._detokenizer.flush(), parts):
            return self._deliver(parts, FinishReason.STOP, everything=False)
        parts.append(self._stop.flush())
        return self._deliver(parts, tokens.finish_reason, everything=True)

    def _append(self, text: str, parts: list[str]) -> bool:
        """Adds what of `text` can be delivered to `parts`; says whether a stop string was completed."""
        if not text:
            return False
        self._decoded += len(text)
        if self.generated_tokens <= self._min_tokens:
            parts.append(text)
            return False
        deliverable, stopped = self._stop.push(text)
        parts.append(deliverable)
        return stopped

    def _deliver(
        self, parts: list[str], finish_reason: FinishReason | None, *, everything: bool
    ) -> TextDelta:
        text = "".join(parts)
        self._delivered += len(text)
        ready = []
        while self._waiting and (everything or self._waiting[0].offset < self._delivered):
            ready.append(self._waiting.popleft())
        return TextDelta(text, tuple(ready), finish_reason)
