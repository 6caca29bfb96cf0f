"""What the HTTP side and the worker side of the gateway pass to each other: plain data, one error type.

The HTTP side makes a `Generation` of each choice of a request (`n` choices are `n` generations) and
iterates over `Dispatcher.stream(generation)` (workers/dispatcher.py), which yields `Tokens` and returns
after one with a finish reason, or raises `GenerationError`. Closing the iterator cancels the request at its
worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a generation failed. The values are those of `Reason` in worker.proto, without the prefix."""

    OVERLOADED = "OVERLOADED"
    DRAINING = "DRAINING"
    ENGINE_DEAD = "ENGINE_DEAD"
    ENGINE_STALLED = "ENGINE_STALLED"
    GPU_FAULT = "GPU_FAULT"
    KV_EXHAUSTED = "KV_EXHAUSTED"
    BAD_REQUEST = "BAD_REQUEST"
    POISONED = "POISONED"
    NOT_READY = "NOT_READY"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the fields are those of `Sampling` in worker.proto, where they are explained."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate. Everything that is needed to start it anywhere, any number of times."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    # On the clock of time.monotonic(): by then it is finished, or fails.
    deadline: float
    # What the tokens must spell, for the llguidance library; None: anything.
    grammar: str | None = None
    # Whose it is: the name of an API key, or "" when there are none.
    client: str = ""
    # The smaller, the more urgent.
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs: of the sampled token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Tokens:
    """New tokens of a generation. The stop token that ended it, if one did, is the last of them.

    Nobody changes one. It is not frozen because making one would take twice as long, as often as a token
    comes.
    """

    token_ids: tuple[int, ...]
    # As many as `token_ids` when asked for; else empty.
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that at least one known worker serves."""

    id: str
    architecture: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # Unix time in seconds at which the gateway learnt of it.
    created: int


class GenerationError(Exception):
    """A generation ended without a finish reason.

    `retryable`: the client may send it again, after `retry_after` seconds. `code`: a narrower name than the
    reason's, for clients.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retryable: bool,
        retry_after: float = 0.0,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable
        self.retry_after = retry_after
        self.code = code
