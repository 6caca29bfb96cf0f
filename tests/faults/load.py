"""Streams of completions under load: what each client saw, and a reference to hold it against."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx

from tests.tiny import EOS_TOKEN_ID

# Special tokens: no ordinary prompt holds them and `logit_bias` keeps the model from saying them, so faults
# that are tied to them strike exactly the requests that carry them.
KILLING_TOKEN_ID = 0
RAISING_TOKEN_ID = EOS_TOKEN_ID
MAX_TOKENS = 160
# Between the best and the second token, in nats: a step's batch changes sums in their last bits only.
SAFE_MARGIN = 2e-4


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]

    def body(self, model: str, **extra: object) -> dict[str, object]:
        return {
            "model": model,
            "prompt": list(self.token_ids),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logit_bias": {str(KILLING_TOKEN_ID): -100, str(RAISING_TOKEN_ID): -100},
            **extra,
        }


@dataclass
class Seen:
    """What the client of one stream saw."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, object] | None = None
    errors: list[dict[str, object]] = field(default_factory=list)
    chunks: int = 0
    done: bool = False
    # Of each token that came with them: texts and logarithms of probabilities.
    tops: list[dict[str, float]] = field(default_factory=list)

    def answer(self) -> tuple[object, ...]:
        """What must not depend on faults."""
        tokens = self.usage and (self.usage["prompt_tokens"], self.usage["completion_tokens"])
        return (self.status, self.text, self.finish_reason, tokens, self.errors, self.done)


async def stream(
    client: httpx.AsyncClient, body: dict[str, object], on_chunk: Callable[[], None] = lambda: None
) -> Seen:
    """Sends one streaming completion and reads it to its end."""
    seen = Seen()
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        seen.status = response.status_code
        if response.status_code != 200:
            seen.errors.append(json.loads(await response.aread())["error"])
            return seen
        async for line in _lines(response):
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                seen.done = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                seen.errors.append(chunk["error"])
                continue
            seen.usage = chunk.get("usage") or seen.usage
            for choice in chunk["choices"]:
                seen.text += choice["text"]
                seen.finish_reason = choice["finish_reason"] or seen.finish_reason
                seen.chunks += 1
                seen.tops += (choice.get("logprobs") or {}).get("top_logprobs", [])
                on_chunk()
    return seen


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """As SSE has them. `aiter_lines` ends lines at characters, too, that may be part of a text."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


async def sure_prompts(client: httpx.AsyncClient, model: str, count: int) -> list[tuple[Prompt, Seen]]:
    """`count` prompts whose greedy text hangs on no near tie, each with what an undisturbed stream gives."""
    candidates = [Prompt(tuple(10 + (i * 37 + j * 11) % 250 for j in range(5 + i))) for i in range(2 * count)]
    bodies = [prompt.body(model, logprobs=2) for prompt in candidates]
    seen = await asyncio.gather(*(stream(client, body) for body in bodies))
    for one in seen:
        assert one.answer()[0] == 200
        assert not one.errors
        assert one.usage is not None
        assert one.usage["completion_tokens"] == len(one.tops) == MAX_TOKENS
    pairs = zip(candidates, seen, strict=True)
    sure = [(prompt, one) for prompt, one in pairs if _margin(one.tops) > SAFE_MARGIN][:count]
    assert len(sure) == count, f"only {len(sure)} prompts of {len(candidates)} have safe margins"
    return sure


def _margin(tops: list[dict[str, float]]) -> float:
    """Two ids of one text share a key: such a position says nothing about it."""
    return min(max(top.values()) - min(top.values()) for top in tops if len(top) == 2)
