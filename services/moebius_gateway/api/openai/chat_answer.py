"""Answers of POST /v1/chat/completions."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from moebius_gateway.api.answer import Answer
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.openai.shared import ChunkStream, chat_logprobs, usage_json
from moebius_gateway.api.sse import event
from moebius_gateway.text.assembler import AnswerDelta, TextLogprobs
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason

# Stands for the text of a chunk where the rest of it is written beforehand.
HOLE = "\0"


class ChatDialect(ChunkStream):
    def __init__(
        self,
        model: str,
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        self._base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._chunk = (
            self._base | {"object": "chat.completion.chunk"} | ({"usage": None} if include_usage else {})
        )
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        # By choice: a chunk's bytes before and behind its text. A choice that is there has been introduced.
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._called: set[int] = set()

    def chunk(self, choice: Choice, delta: AnswerDelta) -> bytes:
        index, events = choice.index, b""
        if self._continuous_usage:
            self._chunk["usage"] = usage_json(choice.usage())
        frame = self._frames.get(index)
        if frame is None:
            events = self._event(index, {"role": "assistant", "content": ""})
        if frame is None or self._continuous_usage:
            head, tail = self._event(index, {"content": HOLE}).split(orjson.dumps(HOLE))
            frame = self._frames[index] = head, tail
        # Log probabilities go with the first thing that is said.
        logprobs = self._logprobs_json(delta.logprobs) if delta.logprobs else None
        for said in delta.events:
            if isinstance(said, ContentDelta) and logprobs is None:
                events += frame[0] + orjson.dumps(said.text) + frame[1]
            elif isinstance(said, ToolCallEnd):
                self._called.add(index)
            else:
                events += self._event(index, _delta_json(said), logprobs)
                logprobs = None
        if logprobs is not None:
            events += self._event(index, {}, logprobs)
        if delta.finish_reason:
            reason = _finish_reason(delta.finish_reason, index in self._called)
            events += self._event(index, {}, finish_reason=reason)
        return events

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            {
                "index": index,
                "message": _message_json(answer),
                "logprobs": self._logprobs_json(answer.logprobs),
                "finish_reason": _finish_reason(answer.finish_reason, bool(answer.calls)),
            }
            for index, answer in enumerate(answers)
        ]
        return orjson.dumps(
            self._base | {"object": "chat.completion", "choices": choices, "usage": usage_json(usage)}
        )

    def _event(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._chunk | {"choices": [choice]})

    def _logprobs_json(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": chat_logprobs(tokens, self._token_bytes), "refusal": None}


def _delta_json(said: Event) -> dict[str, Any]:
    match said:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd():
            return {}


def _message_json(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _finish_reason(reason: FinishReason | None, called: bool) -> str | None:
    return "tool_calls" if called and reason is FinishReason.STOP else reason
