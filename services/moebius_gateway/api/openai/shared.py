"""What answers of OpenAI's APIs have in common."""

from collections.abc import Sequence
from typing import Any

from moebius_gateway.api.choices import Usage
from moebius_gateway.api.dialect import LEAST_LOGPROB, spelt
from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.sse import DONE, event
from moebius_gateway.text.assembler import TextLogprobs
from moebius_gateway.text.token_bytes import TokenBytes


class ChunkStream:
    """How a stream of chunks ends, well or not. `_chunk`: what its chunks have in common."""

    _chunk: dict[str, Any]
    _include_usage: bool

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._chunk | {"choices": [], "usage": usage_json(usage)}) + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chat_logprobs(tokens: Sequence[TextLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """As chat completions and responses write them."""

    def token_json(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes.spelling(token_id)
        return {"token": spelt(data), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}

    return [
        token_json(token.token_id, token.logprobs.logprob)
        | {"top_logprobs": [token_json(*top) for top in token.logprobs.top]}
        for token in tokens
    ]
