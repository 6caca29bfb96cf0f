"""From token ids to text, one token at a time, in whole characters only."""

import codecs

from moebius_gateway.text.token_bytes import TokenBytes


class Detokenizer:
    """Decodes one sequence. Each token is seen once, at a cost that does not grow with the sequence.

    The texts that `push` and `flush` return, joined, are the bytes of all tokens decoded as UTF-8, with
    U+FFFD for what is not UTF-8. A character whose last byte has not come yet is held back.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """The end: U+FFFD for a character that stayed incomplete."""
        return self._decode(b"", True)
