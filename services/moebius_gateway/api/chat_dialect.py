"""Answers of POST /v1/chat/completions."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.dialect import LEAST_LOGPROB, Answer, spelt
from moebius_gateway.api.sse import DONE, event
from moebius_gateway.text.assembler import TextDelta, TextLogprobs
from moebius_gateway.text.token_bytes import TokenBytes


class ChatDialect:
    def __init__(self, model: str, token_bytes: TokenBytes, *, logprobs: bool, include_usage: bool) -> None:
        self._base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._chunk = (
            self._base | {"object": "chat.completion.chunk"} | ({"usage": None} if include_usage else {})
        )
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._introduced: set[int] = set()

    def chunk(self, choice: Choice, delta: TextDelta) -> bytes:
        events = b""
        if choice.index not in self._introduced:
            self._introduced.add(choice.index)
            events = self._event(choice.index, {"role": "assistant", "content": ""})
        if delta.text or delta.logprobs:
            events += self._event(choice.index, {"content": delta.text}, self._logprobs_json(delta.logprobs))
        if delta.finish_reason:
            events += self._event(choice.index, {}, finish_reason=delta.finish_reason)
        return events

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._chunk | {"choices": [], "usage": usage.as_json()}) + DONE

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs_json(answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return orjson.dumps(
            self._base | {"object": "chat.completion", "choices": choices, "usage": usage.as_json()}
        )

    def _event(
        self, index: int, delta: dict[str, str], logprobs: Any = None, finish_reason: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._chunk | {"choices": [choice]})

    def _logprobs_json(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            self._token_json(token.token_id, token.logprobs.logprob)
            | {"top_logprobs": [self._token_json(*top) for top in token.logprobs.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token_json(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes.spelling(token_id)
        return {"token": spelt(data), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}
