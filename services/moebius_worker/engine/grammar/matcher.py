"""Where one answer stands in its grammar."""

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

# Bits, 32 tokens in each number: a set bit allows the token.
MaskRow = NDArray[np.int32]

# A mask takes a tenth of a second at most: the first of (a{1000}){1000} would take seconds, in which its
# neighbours wait. The gateway refuses what it sees to need more. The long form of errors shows the state of
# the parser, which is of no use to a client.
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


class GrammarError(Exception):
    """The request's grammar cannot be followed; the message is for its author."""


class GrammarMatcher:
    """Follows one answer. Not thread safe."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, answer: Sequence[int]) -> None:
        """`answer`: tokens that were generated before. Takes milliseconds, or more. Raises GrammarError."""
        self.raw = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if self.raw.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {self.raw.get_error()}")
        if answer and not self.raw.consume_tokens(list(answer)):
            raise GrammarError(f"the resumed tokens do not keep to the grammar: {self._error()}")

    @property
    def fault(self) -> str | None:
        """Why nothing more is allowed: the grammar takes too much to follow."""
        return f"the grammar cannot be followed: {self._error()}" if self.raw.is_error() else None

    def accept(self, token_id: int) -> bool:
        """Takes a token that its mask allowed; whether the answer is complete, so that nothing can follow.

        Raises GrammarError if the grammar takes too much to follow.
        """
        if not self.raw.consume_token(token_id):
            raise GrammarError(f"the grammar cannot be followed: {self._error()}")
        return self.raw.is_stopped()

    def _error(self) -> str:
        return self.raw.get_error() or "nothing may follow what was there before them"


def bar(row: MaskRow, token_ids: Collection[int]) -> None:
    """Takes away the permission of these tokens, unless no other has it: then the answer has to end."""
    before = row.copy()
    bits = row.view(np.uint32)
    for token_id in token_ids:
        if token_id < 32 * len(bits):
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not row.any():
        row[:] = before
