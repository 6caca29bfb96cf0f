"""The part of an API's answers that differs from one API to the next: how deltas and answers are written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.text.assembler import TextDelta, TextLogprobs
from moebius_gateway.types import FinishReason

# JSON has no infinity; this is what is written for the log of a probability of zero.
LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class Answer:
    """A choice's deltas, put together."""

    text: str = ""
    logprobs: list[TextLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason


class Dialect(Protocol):
    """One for each request; it knows the request's id and model, and which choices it has introduced."""

    def chunk(self, choice: Choice, delta: TextDelta) -> bytes:
        """The events for a delta."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The events at the good end of a stream."""
        ...

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The body of an answer in one piece; `answers` are in the order of the choices' indices."""
        ...


def spelt(data: bytes, prefix: str = "") -> str:
    r"""A token as text; one that holds a part of a character as its bytes, `\xe4\xbd`, behind `prefix`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
