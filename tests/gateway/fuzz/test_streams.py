"""Whatever tokens come, cut anywhere: others read each dialect's stream, and it says what one piece would."""

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_gateway.api.answer import Answer
from moebius_gateway.api.anthropic.messages_answer import MessagesDialect
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.dialect import Dialect
from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.openai.chat_answer import ChatDialect
from moebius_gateway.api.openai.completion_answer import CompletionDialect
from moebius_gateway.api.responses.answer import ResponsesDialect
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.model import EncodedPrompt, TextModel
from moebius_gateway.types import FinishReason, TokenLogprobs, Tokens
from tests.gateway.api.chatty import CALL, MODEL, SCHEMA, chatty_files
from tests.gateway.dispatching import generation
from tests.gateway.fuzz.sse_reader import ServerEvent, read_events
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE

# What breaks lines somewhere, or is cut.
NASTY = [
    "\n\n",
    "\r",
    "\r\n",
    "\u2028",
    "\0",
    "data: x\n\n",
    ": ",
    "event: x\n",
    "🙂",
    "é",
    "\\",
    '"',
    "[DONE]",
]
MARKED = ["<think>", "</think>", CALL, CALL[:30], "<tool_call>", "</tool_call>", "\n", " "]


@cache
def model() -> TextModel:
    return TextModel(chatty_files())


@cache
def ids(text: str) -> tuple[int, ...]:
    [encoded] = model()._encode([text], False)
    return encoded


TOKENS = st.lists(
    st.one_of(
        st.sampled_from([ids(text) for text in (*NASTY, *MARKED)]),
        st.integers(0, VOCAB_SIZE - 1).map(lambda token_id: (token_id,)),
        st.text(max_size=5).map(ids),
    ),
    max_size=30,
).map(lambda pieces: [token_id for piece in pieces for token_id in piece if token_id != EOS_TOKEN_ID])


def dialects() -> dict[str, Callable[[], Dialect]]:
    spelling = model().token_bytes
    return {
        "chat": lambda: ChatDialect(
            MODEL.id, spelling, logprobs=True, include_usage=True, continuous_usage=True
        ),
        "fast chat": lambda: ChatDialect(MODEL.id, spelling, logprobs=False, include_usage=False),
        "completion": lambda: CompletionDialect(MODEL.id, spelling, logprobs=True, include_usage=True),
        "messages": lambda: MessagesDialect(MODEL.id, 3),
        "responses": lambda: ResponsesDialect(
            MODEL.id, {}, spelling, lambda _: None, logprobs=True, encrypted=True
        ),
    }


def choice(chat: bool) -> Choice:
    prompt = EncodedPrompt((5, 6, 7), chat=chat, tools=(Tool("weather", parameters=SCHEMA),))
    return Choice(0, generation(), model().assembler(prompt, (), (EOS_TOKEN_ID,)), first_of_prompt=True)


def pieces(tokens: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[Tokens]:
    ends = [EOS_TOKEN_ID] if finish is FinishReason.STOP else []
    bounds = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    parts = [tuple(tokens[a:b]) for a, b in itertools.pairwise(bounds)]
    logprobs = [tuple(TokenLogprobs(-1.0, ((3, -2.0),)) for _ in part) for part in parts]
    last = Tokens(tuple(ends), tuple(TokenLogprobs(-1.0, ()) for _ in ends), finish)
    return [*(Tokens(part, logprob) for part, logprob in zip(parts, logprobs, strict=True)), last]


def streamed(dialect: Dialect, chat: bool, said: Sequence[Tokens]) -> list[ServerEvent]:
    one, stream = choice(chat), b""
    for piece in said:
        delta = one.text.push(piece)
        if delta.events or delta.logprobs or delta.finish_reason:
            stream += dialect.chunk(one, delta)
    return list(read_events(stream + dialect.end(Usage.of([one]))))


def in_one_piece(dialect: Dialect, chat: bool, said: Sequence[Tokens]) -> dict[str, Any]:
    one, answer = choice(chat), Answer()
    for piece in said:
        answer.add(one.text.push(piece))
    return json.loads(dialect.response([answer], Usage.of([one])))


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 400), max_size=8), st.sampled_from(FinishReason))
def test_streams_are_read_by_others(tokens: list[int], cuts: list[int], finish: FinishReason) -> None:
    said = pieces(tokens, cuts, finish)
    for name, build in dialects().items():
        chat = name != "completion"
        events = streamed(build(), chat, said)
        whole = in_one_piece(build(), chat, said)
        TOLD[name.split()[-1]](events, whole)


def _chunks(events: list[ServerEvent]) -> list[Any]:
    assert events[-1].data == "[DONE]"
    return [json.loads(event.data)["choices"][0] for event in events[:-1] if '"choices":[]' not in event.data]


def _chat(events: list[ServerEvent], whole: dict[str, Any]) -> None:
    [told] = whole["choices"]
    chunks = _chunks(events)
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (told["message"]["content"] or "")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == told["message"].get(
        "reasoning_content", ""
    )
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    for call in told["message"].get("tool_calls", ()):
        assert call["function"]["arguments"] in arguments.values()
        json.loads(call["function"]["arguments"])
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [told["finish_reason"]]


def _completion(events: list[ServerEvent], whole: dict[str, Any]) -> None:
    [told] = whole["choices"]
    chunks = _chunks(events)
    assert "".join(chunk["text"] for chunk in chunks) == told["text"]
    assert chunks[-1]["finish_reason"] == told["finish_reason"]
    logprobs = [token for chunk in chunks for token in chunk["logprobs"]["tokens"]]
    assert logprobs == told["logprobs"]["tokens"]


def _messages(events: list[ServerEvent], whole: dict[str, Any]) -> None:
    data = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [one["type"] for one in data]
    assert data[0]["type"] == "message_start"
    assert data[-1]["type"] == "message_stop"
    opened: int | None = None
    texts, kinds = dict[int, str](), dict[int, str]()
    for one in data:
        match one["type"]:
            case "content_block_start":
                assert opened is None
                opened = one["index"]
                texts[opened], kinds[opened] = "", one["content_block"]["type"]
            case "content_block_delta":
                assert one["index"] == opened
                delta = one["delta"]
                texts[opened] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            case "content_block_stop":
                assert one["index"] == opened
                opened = None
    assert opened is None
    for kind, key in (("text", "text"), ("thinking", "thinking")):
        said = "".join(block[key] for block in whole["content"] if block["type"] == kind)
        assert "".join(texts[i] for i in texts if kinds[i] == kind) == said
    inputs = [json.dumps(b["input"]) for b in whole["content"] if b["type"] == "tool_use"]
    if data[-2]["delta"]["stop_reason"] == "tool_use":
        assert inputs == [json.dumps(json.loads(texts[i])) for i in texts if kinds[i] == "tool_use"]
    assert data[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def _responses(events: list[ServerEvent], whole: dict[str, Any]) -> None:
    data = [json.loads(event.data) for event in events]
    assert [event.name for event in events] == [one["type"] for one in data]
    assert [one["sequence_number"] for one in data] == list(range(len(data)))
    final = data[-1]["response"]
    assert final["status"] == whole["status"]

    def told(response: dict[str, Any]) -> list[Any]:
        return [
            (
                item["type"],
                item["status"],
                item.get("arguments"),
                [c["text"] for c in item.get("content", ())],
            )
            for item in response["output"]
        ]

    assert told(final) == told(whole)


TOLD = {"chat": _chat, "completion": _completion, "messages": _messages, "responses": _responses}


@settings(max_examples=100, deadline=None)
@given(st.text(), st.one_of(st.none(), st.text()), st.integers(400, 599))
def test_errors_in_a_stream_are_read_by_others(message: str, param: str | None, status: int) -> None:
    error = ApiError(status, message, param=param, code="engine_dead")
    for build in dialects().values():
        told = json.loads(next(read_events(build().error(error))).data)
        assert message in (told.get("message"), told.get("error", {}).get("message"))
