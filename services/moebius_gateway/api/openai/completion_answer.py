"""Answers of POST /v1/completions."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.answer import Answer
from moebius_gateway.api.dialect import LEAST_LOGPROB, spelt
from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.openai.shared import usage_json
from moebius_gateway.api.sse import DONE, event
from moebius_gateway.text.assembler import AnswerDelta, TextLogprobs
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason


class CompletionDialect:
    def __init__(self, model: str, token_bytes: TokenBytes, *, logprobs: bool, include_usage: bool) -> None:
        self._base = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._chunk = self._base | ({"usage": None} if include_usage else {})
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._include_usage = include_usage

    def chunk(self, choice: Choice, delta: AnswerDelta) -> bytes:
        json = self._choice_json(choice.index, delta.text, delta.logprobs, delta.finish_reason)
        return event(self._chunk | {"choices": [json]})

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._chunk | {"choices": [], "usage": usage.as_json()}) + DONE

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            self._choice_json(index, answer.text, answer.logprobs, answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return orjson.dumps(self._base | {"choices": choices, "usage": usage.as_json()})

    def _choice_json(
        self, index: int, text: str, logprobs: Sequence[TextLogprobs], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs_json(logprobs) if self._logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs_json(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
        return {
            "tokens": [self._spelt(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprobs.logprob, LEAST_LOGPROB) for token in tokens],
            "top_logprobs": [self._top_json(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top_json(self, token: TextLogprobs) -> dict[str, float]:
        """The most likely tokens, and the one that was chosen if it is not among them."""
        top = (*token.logprobs.top, (token.token_id, token.logprobs.logprob))
        return {self._spelt(token_id): max(logprob, LEAST_LOGPROB) for token_id, logprob in top}

    def _spelt(self, token_id: int) -> str:
        return spelt(self._token_bytes.spelling(token_id), prefix="bytes:")
