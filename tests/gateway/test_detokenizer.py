"""Whatever the tokens and wherever they are cut, joined deltas are the whole text, in whole characters."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from moebius_gateway.text.detokenizer import Detokenizer
from moebius_gateway.text.errors import TextError
from moebius_gateway.text.token_bytes import TokenBytes
from tests.tiny import write_tokenizer

TEXTS = [
    "plain ascii, with  two spaces\nand lines\r\n",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽 🙂",
    "こんにちは世界 你好，世界 안녕하세요",
    "e\u0301 a\u0308 Z\u0351\u036b\u0343 \u0e01\u0e33 \u202e",
    "\U0001d54f\U00020000 \ufffd \x00 \x7f",
]
SENTENCEPIECE_TOKENS = ["▁", "a", "b", "▁Hello", "▁world", "!", "é", "世", "🙂", "▁▁▁", "\n"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("byte-level")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: byte tokens behind the control tokens, then pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_TOKENS]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def deltas(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    spelling = TokenBytes(tokenizer).spelling
    ids = {spelling(i): i for i in reversed(range(tokenizer.get_vocab_size()))}
    return [ids[bytes([byte])] for byte in data]


def tokenizations(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """The tokenizer's own, byte by byte, and mixtures of both cut at random bytes."""
    data, draw = text.encode(), random.Random(text)
    yield tokenizer.encode(text, add_special_tokens=False).ids
    yield byte_ids(tokenizer, data)
    for _ in range(20):
        ids = []
        cuts = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(4))})
        for start, end in itertools.pairwise(cuts):
            try:
                ids += tokenizer.encode(data[start:end].decode(), add_special_tokens=False).ids
            except UnicodeDecodeError:
                ids += byte_ids(tokenizer, data[start:end])
        yield ids


@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_are_the_text(byte_level: Tokenizer, text: str) -> None:
    for ids in tokenizations(byte_level, text):
        pieces = deltas(byte_level, ids)
        assert "".join(pieces) == text == byte_level.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces), "half a character was emitted"


@pytest.mark.parametrize("text", TEXTS)
def test_a_sequence_that_is_cut_anywhere_says_what_the_library_says(byte_level: Tokenizer, text: str) -> None:
    ids = byte_ids(byte_level, text.encode())
    for end in range(len(ids)):
        assert "".join(deltas(byte_level, ids[:end])) == byte_level.decode(ids[:end])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_random_bytes_are_decoded_as_the_library_does(byte_level: Tokenizer, data: bytes) -> None:
    ids = byte_ids(byte_level, data)
    assert "".join(deltas(byte_level, ids)) == byte_level.decode(ids) == data.decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40))
def test_random_ids_are_decoded_as_the_library_does(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(deltas(byte_level, ids)) == byte_level.decode(ids, skip_special_tokens=True)


def test_a_delta_comes_with_the_token_that_completes_its_character(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, "é🙂x".encode())
    assert deltas(byte_level, ids) == ["", "é", "", "", "", "🙂", "x", ""]


def test_what_stays_incomplete_becomes_a_replacement_character_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, "a🙂".encode()[:-1])
    assert deltas(byte_level, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_say_nothing_and_other_added_tokens_do(byte_level: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    tokenizer.add_tokens([AddedToken("<思考>", special=False)])
    added, end = tokenizer.token_to_id("<思考>"), tokenizer.token_to_id("<|im_end|>")
    assert deltas(tokenizer, [added, end, added]) == ["<思考>", "", "<思考>", ""]
    assert TokenBytes(tokenizer).spelling(end) == b"<|im_end|>"


def test_ids_beyond_the_vocabulary_say_nothing(byte_level: Tokenizer) -> None:
    """Models often have more rows of logits than the tokenizer has tokens."""
    assert deltas(byte_level, [100_000]) == ["", ""]


def test_sentencepiece_keeps_the_space_of_its_first_token(sentencepiece: Tokenizer) -> None:
    """The text goes on behind a prompt, so that its first space is one."""
    ids = [sentencepiece.token_to_id(token) for token in ("▁Hello", "▁world", "!", "▁▁▁", "</s>")]
    assert deltas(sentencepiece, ids) == [" Hello", " world", "!", "   ", "", ""]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(SENTENCEPIECE_TOKENS), st.characters(codec="utf-8")), max_size=20))
def test_sentencepiece_with_byte_fallback(sentencepiece: Tokenizer, pieces: list[str]) -> None:
    """Whole characters as byte tokens between pieces: as the library decodes them behind something."""
    ids = [sentencepiece.token_to_id("a")]
    for piece in pieces:
        token_id = sentencepiece.token_to_id(piece)
        ids += [3 + byte for byte in piece.encode()] if token_id is None else [token_id]
    assert "".join(deltas(sentencepiece, ids)) == sentencepiece.decode(ids)


def test_sentencepiece_bytes_that_are_no_text(sentencepiece: Tokenizer) -> None:
    """A broken character spoils itself alone (the library's decoder replaces the whole run of bytes)."""
    ids = [3 + byte for byte in b"\xe4\xbd\xa0\xff"] + [sentencepiece.token_to_id("!")]
    assert "".join(deltas(sentencepiece, ids)) == "你\ufffd!"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), None])
def test_an_unknown_decoder_is_refused_by_name(decoder: object) -> None:
    tokenizer = Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(TextError, match=type(decoder).__name__ if decoder else "missing"):
        TokenBytes(tokenizer)
