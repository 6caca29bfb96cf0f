"""From tokens to events in each family's format, and which family a model is of."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from moebius_gateway.journal import Record
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.model import EncodedPrompt, TextModel
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.registry import TextModels
from moebius_gateway.types import FinishReason, Generation, Sampling, Tokens
from moebius_gateway.workers.wire import submit_frame
from tests.gateway.api.chatty import MODEL, SCHEMA, chatty_files
from tests.gateway.http_server import tokenizer_files

WEATHER = Tool("weather", parameters=SCHEMA)
MARKERS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|other|>"]


@pytest.fixture(scope="module")
def harmony() -> TextModel:
    """Its markers are special tokens, of which one ends the generation."""
    tokenizer = Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])
    tokenizer.add_special_tokens(MARKERS)
    return TextModel(tokenizer_files() | {"tokenizer.json": tokenizer.to_str().encode()})


def events(model: TextModel, text: str, stop: str, **prompt: Any) -> tuple[list[Event], FinishReason | None]:
    assembler = model.assembler(
        EncodedPrompt((1,), chat=True, tools=(WEATHER,), **prompt), (), {model.special_tokens[stop]}
    )
    ids = model._tokenizer.encode(text, add_special_tokens=False).ids
    deltas = [
        assembler.push(Tokens((token_id,), finish_reason=FinishReason.STOP if i == len(ids) - 1 else None))
        for i, token_id in enumerate(ids)
    ]
    return [event for delta in deltas for event in delta.events], deltas[-1].finish_reason


def test_markers_that_are_special_tokens_reach_the_parser_and_no_others_reach_the_client(
    harmony: TextModel,
) -> None:
    assert harmony.spec.name == "harmony", "told by its special tokens"
    text = (
        "<|channel|>analysis<|message|>Hm<|other|><|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
    )
    got, finish = events(harmony, text, "<|call|>")
    assert "".join(event.text for event in got if isinstance(event, ReasoningDelta)) == "Hm"
    assert [event.name for event in got if isinstance(event, ToolCallStart)] == ["weather"]
    assert isinstance(got[-1], ToolCallEnd)
    assert not any(isinstance(event, ContentDelta) for event in got)
    assert finish is FinishReason.STOP


def test_plain_text_has_no_format(harmony: TextModel) -> None:
    assembler = harmony.assembler(EncodedPrompt((1,)))
    ids = harmony._tokenizer.encode("<|channel|>analysis<|message|>Hm", add_special_tokens=False).ids
    assert assembler.push(Tokens(tuple(ids))).events == (ContentDelta("analysisHm"),)


async def test_a_family_can_be_set() -> None:
    texts = TextModels(lambda _: chatty_files(), {MODEL.id: "glm"})
    assert (await texts.get(MODEL)).spec.name == "glm"
    assert (await TextModels(lambda _: chatty_files()).get(MODEL)).spec.name == "hermes"


def test_a_grammar_goes_with_every_attempt() -> None:
    """A worker that goes on with a generation replays the tokens that were delivered."""
    for grammar in ("start: /a*/", None):
        generation = Generation("r", MODEL.id, (1, 2), 9, 0, (), Sampling(), 1e9, grammar)
        record = Record(generation, MODEL)
        record.deliver(Tokens((5, 6)))
        submit = submit_frame(record.submit(1, 0.0)).submit
        assert (list(submit.token_ids), submit.resumed) == ([1, 2, 5, 6], 2)
        assert submit.HasField("grammar") is (grammar is not None)
        assert submit.grammar.text == (grammar or "")
