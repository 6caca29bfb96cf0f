"""What each token id says, as bytes: the one fact about a tokenizer that decoding needs.

Tokens of byte-level BPE and of byte-fallback SentencePiece may hold a part of a character, so text can only
be made of bytes. The bytes of a sequence are those of its tokens, joined. Nothing is trimmed at the front (as
SentencePiece does at the start of a text), since what a model generates always continues a prompt.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from moebius_gateway.text.errors import TextError

SENTENCEPIECE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


class TokenBytes(dict[int, bytes]):
    """Maps each token id to its bytes, found on first use. Special and unknown ids say nothing: b""."""

    def __init__(self, tokenizer: Tokenizer, visible: Collection[str] = ()) -> None:
        """Special tokens of `visible` do say something: themselves.

        Raises `TextError` for a decoder that is neither byte-level nor SentencePiece's.
        """
        super().__init__()
        self._tokenizer = tokenizer
        self._visible = visible
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
        decoders = list(_leaves(state)) if state else []
        kinds = {decoder["type"] for decoder in decoders}
        self._byte_level = _byte_of_char() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        if not kinds or not (self._byte_level or kinds <= SENTENCEPIECE):
            raise TextError(f"tokenizer.json: decoder {sorted(kinds) or 'missing'} is not supported")
        self._replacements = [] if self._byte_level else [pair for d in decoders if (pair := _replacement(d))]

    def __missing__(self, token_id: int) -> bytes:
        data = self.spelling(token_id)
        if token_id in self._special and data.decode() not in self._visible:
            data = b""
        self[token_id] = data
        return data

    def special(self) -> dict[str, int]:
        """Special tokens' ids by their text."""
        return {self.spelling(token_id).decode(): token_id for token_id in self._special}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def spelling(self, token_id: int) -> bytes:
        """As `self[token_id]`, but special tokens are spelt out ("<|im_end|>")."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return (token or "").encode()
        if self._byte_level is not None:
            data = [self._byte_level.get(char) for char in token]
            # An added token is not written in the byte alphabet.
            return token.encode() if None in data else bytes(byte for byte in data if byte is not None)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _leaves(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _leaves(part)
    else:
        yield decoder


def _replacement(decoder: Mapping[str, Any]) -> tuple[str, str] | None:
    if decoder["type"] == "Metaspace":
        return decoder["replacement"], " "
    if decoder["type"] == "Replace":
        if "String" not in decoder["pattern"]:
            raise TextError("tokenizer.json: a decoder that replaces by regular expression is not supported")
        return decoder["pattern"]["String"], decoder["content"]
    return None


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes are themselves, others are moved to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
