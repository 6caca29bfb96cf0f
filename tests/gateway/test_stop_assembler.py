"""Tokens to answers: stop strings, stop tokens, log probabilities that belong to the text."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moebius_gateway.text.assembler import AnswerAssembler, AnswerDelta
from moebius_gateway.text.parsing.events import ContentDelta
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason, TokenLogprobs, Tokens
from tests.tiny import EOS_TOKEN_ID, write_tokenizer


@pytest.fixture(scope="module")
def token_bytes(tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return TokenBytes(Tokenizer.from_file(str(folder / "tokenizer.json")))


def ids_of(token_bytes: TokenBytes, text: str) -> list[int]:
    ids = {token_bytes.spelling(i): i for i in reversed(range(300))}
    return [ids[bytes([byte])] for byte in text.encode()]


def said(delta: AnswerDelta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, ContentDelta))


def feed(
    assembler: AnswerAssembler, ids: list[int], finish: FinishReason | None = None, *, logprobs: bool = False
) -> list[AnswerDelta]:
    """One token at a time, until a delta says that it is over."""
    deltas = []
    for i, token_id in enumerate(ids):
        deltas.append(
            assembler.push(
                Tokens(
                    (token_id,),
                    (TokenLogprobs(-float(i), ()),) if logprobs else (),
                    finish if i == len(ids) - 1 else None,
                )
            )
        )
        if deltas[-1].finish_reason:
            break
    return deltas


def test_a_stop_string_ends_the_text_before_it_and_counts_what_was_generated(token_bytes: TokenBytes) -> None:
    assembler = AnswerAssembler(token_bytes, ["界x"])
    deltas = feed(assembler, ids_of(token_bytes, "世界xyz"))
    assert "".join(said(delta) for delta in deltas) == "世"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert assembler.generated_tokens == 7


def test_a_partial_stop_string_is_delivered_at_the_end(token_bytes: TokenBytes) -> None:
    deltas = feed(AnswerAssembler(token_bytes, ["stop"]), ids_of(token_bytes, "a sto"), FinishReason.LENGTH)
    assert [said(delta) for delta in deltas] == ["a", " ", "", "", "sto"]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_the_stop_token_is_counted_but_not_part_of_the_text(token_bytes: TokenBytes) -> None:
    [x] = ids_of(token_bytes, "x")
    [y] = ids_of(token_bytes, "y")
    assembler = AnswerAssembler(token_bytes, stop_token_ids=[y])
    deltas = feed(assembler, [x, y], FinishReason.STOP, logprobs=True)
    assert "".join(said(delta) for delta in deltas) == "x"
    assert [len(delta.logprobs) for delta in deltas] == [1, 0]
    assert assembler.generated_tokens == 2


def test_a_finish_reason_that_comes_alone_changes_nothing(token_bytes: TokenBytes) -> None:
    """The worker died between its last token and the word that this was the last."""
    [x, y] = ids_of(token_bytes, "xy")
    assembler = AnswerAssembler(token_bytes, stop_token_ids=[y])
    deltas = feed(assembler, [x, y])
    deltas.append(assembler.push(Tokens((), finish_reason=FinishReason.STOP)))
    assert "".join(said(delta) for delta in deltas) == "x"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert assembler.generated_tokens == 2


def test_half_a_character_is_flushed_before_the_end(token_bytes: TokenBytes) -> None:
    ids = [*ids_of(token_bytes, "🙂")[:3], EOS_TOKEN_ID]
    deltas = feed(AnswerAssembler(token_bytes, stop_token_ids=[EOS_TOKEN_ID]), ids, FinishReason.STOP)
    assert [said(delta) for delta in deltas] == ["", "", "", "\ufffd"]


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(token_bytes: TokenBytes) -> None:
    deltas = feed(AnswerAssembler(token_bytes, ["a"], min_tokens=3), ids_of(token_bytes, "aaaaa"))
    assert [said(delta) for delta in deltas] == ["a", "a", "a", ""]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_log_probabilities_come_with_their_text(token_bytes: TokenBytes) -> None:
    deltas = feed(
        AnswerAssembler(token_bytes), ids_of(token_bytes, "a🙂b"), FinishReason.LENGTH, logprobs=True
    )
    assert [(said(delta), [entry.offset for entry in delta.logprobs]) for delta in deltas] == [
        ("a", [0]),
        ("", []),
        ("", []),
        ("", []),
        ("🙂", [1, 1, 1, 1]),
        ("b", [2]),
    ]


def test_log_probabilities_of_withheld_and_cut_text_are_withheld_and_cut(token_bytes: TokenBytes) -> None:
    assembler = AnswerAssembler(token_bytes, ["bcd"])
    deltas = feed(assembler, ids_of(token_bytes, "abcabcd"), logprobs=True)
    assert [(said(delta), len(delta.logprobs)) for delta in deltas] == [
        ("a", 1),
        ("", 0),
        ("", 0),
        ("bca", 3),
        ("", 0),
        ("", 0),
        ("", 0),
    ]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_tokens_that_come_together_are_one_delta(token_bytes: TokenBytes) -> None:
    ids = ids_of(token_bytes, "hello")
    assert AnswerAssembler(token_bytes).push(Tokens(tuple(ids))) == AnswerDelta((ContentDelta("hello"),))
    stopped = AnswerAssembler(token_bytes, ["ll"])
    assert stopped.push(Tokens(tuple(ids))) == AnswerDelta((ContentDelta("he"),), (), FinishReason.STOP, "ll")
    assert stopped.generated_tokens == 4
