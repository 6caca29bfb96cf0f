"""The part of an API's answers that differs from one API to the next: how deltas and answers are written."""

from collections.abc import Sequence
from typing import Protocol

from moebius_gateway.api.answer import Answer
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.errors import ApiError
from moebius_gateway.text.assembler import AnswerDelta

# JSON has no infinity; this is what is written for the log of a probability of zero.
LEAST_LOGPROB = -9999.0


class Dialect(Protocol):
    """One for each request; it knows the request's id and model, and which choices it has introduced."""

    def chunk(self, choice: Choice, delta: AnswerDelta) -> bytes:
        """The events for a delta; none if it says nothing in this API."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The events at the good end of a stream."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The event at the bad end of a stream."""
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
