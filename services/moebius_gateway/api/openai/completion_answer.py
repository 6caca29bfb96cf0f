"""Answers of POST /v1/completions."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from moebius_gateway.api.answer import Answer
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.dialect import LEAST_LOGPROB, spelt
from moebius_gateway.api.openai.shared import ChunkStream, usage_json
from moebius_gateway.api.sse import event
from moebius_gateway.text.assembler import AnswerDelta, TextLogprobs
from moebius_gateway.text.parsing.events import ContentDelta
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason


class CompletionDialect(ChunkStream):
    def __init__(
        self,
        model: str,
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        include_usage: bool,
        continuous_usage: bool = False,
        echo: Sequence[str] = (),
    ) -> None:
        """`echo`: by choice, the prompt's text that stands before the answer's."""
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
        self._continuous_usage = continuous_usage
        self._echo = echo
        self._echoed: set[int] = set()

    def chunk(self, choice: Choice, delta: AnswerDelta) -> bytes:
        if self._continuous_usage:
            self._chunk["usage"] = usage_json(choice.usage())
        text = "".join(said.text for said in delta.events if isinstance(said, ContentDelta))
        if self._echo and choice.index not in self._echoed:
            self._echoed.add(choice.index)
            text = self._echo[choice.index] + text
        return self._event(choice.index, text, delta.logprobs, delta.finish_reason)

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        choices = [
            self._choice_json(index, echo + answer.text, answer.logprobs, answer.finish_reason)
            for index, (echo, answer) in enumerate(
                zip(self._echo or [""] * len(answers), answers, strict=True)
            )
        ]
        return orjson.dumps(self._base | {"choices": choices, "usage": usage_json(usage)})

    def _event(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TextLogprobs] = (),
        finish_reason: FinishReason | None = None,
    ) -> bytes:
        return event(self._chunk | {"choices": [self._choice_json(index, text, logprobs, finish_reason)]})

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
