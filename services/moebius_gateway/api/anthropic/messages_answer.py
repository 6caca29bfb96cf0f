"""Answers of POST /v1/messages."""

import base64
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from moebius_gateway.api.answer import Answer, Call, Said, Thought
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.sse import event, named_event
from moebius_gateway.text.assembler import AnswerDelta
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.types import FinishReason


class MessagesDialect:
    """One content block is open at a time; a delta of another kind closes it and opens the next."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._base = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._prompt_tokens = prompt_tokens
        self._begun = False
        self._index = -1
        self._open: type[Event] | None = None
        self._thought = ""
        self._called = False
        self._last = AnswerDelta(())

    def chunk(self, choice: Choice, delta: AnswerDelta) -> bytes:
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            usage = _usage_json(Usage(self._prompt_tokens, 0, choice.cached_tokens, 0))
            message: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            events.append({"type": "message_start", "message": self._base | message})
        for said in delta.events:
            events += self._events(said)
        if delta.finish_reason is not None:
            self._last = delta
            events += self._close()
        return b"".join(map(named_event, events))

    def end(self, usage: Usage) -> bytes:
        delta = _ending(self._last, self._called)
        return named_event(
            {"type": "message_delta", "delta": delta, "usage": _usage_json(usage)}
        ) + named_event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return b"event: error\n" + event(error.anthropic())

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        [answer] = answers
        ending = _ending(answer, bool(answer.calls))
        return orjson.dumps(
            self._base | {"content": list(_blocks(answer)), **ending, "usage": _usage_json(usage)}
        )

    def _events(self, said: Event) -> Iterator[dict[str, Any]]:
        match said:
            case ContentDelta(text):
                yield from self._opened(ContentDelta, {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                yield from self._opened(ReasoningDelta, {"type": "thinking", "thinking": "", "signature": ""})
                self._thought += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStart(_, call_id, name):
                yield from self._close()
                yield from self._opened(
                    ToolCallStart, {"type": "tool_use", "id": _tool_id(call_id), "name": name, "input": {}}
                )
            case ToolCallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case ToolCallEnd():
                self._called = True
                yield from self._close()

    def _opened(self, kind: type[Event], block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open is kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open is ReasoningDelta:
            yield self._delta({"type": "signature_delta", "signature": _signature(self._thought)})
            self._thought = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    for part in answer.parts:
        match part:
            case Said(text):
                yield {"type": "text", "text": text}
            case Thought(text):
                yield {"type": "thinking", "thinking": text, "signature": _signature(text)}
            case Call(call_id, name, arguments, whole) if whole:
                yield {
                    "type": "tool_use",
                    "id": _tool_id(call_id),
                    "name": name,
                    "input": orjson.loads(arguments),
                }


def _ending(last: AnswerDelta | Answer, called: bool) -> dict[str, Any]:
    if last.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif last.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _usage_json(usage: Usage) -> dict[str, Any]:
    """Tokens of the prompt that were cached are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _tool_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _signature(thought: str) -> str:
    """Clients demand one and send it back; nobody here depends on it, as whoever asks may say anything."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()
