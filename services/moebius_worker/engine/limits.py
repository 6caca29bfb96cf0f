"""How much a scheduler takes: its sizes, and the requests that it can never run."""

from dataclasses import dataclass
from typing import Literal

from moebius_worker.engine.types import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    # Tokens a page holds, and pages in the KV cache.
    page_size: int
    num_pages: int
    # Requests that hold pages at a time; no more than `max_step_tokens` are used, so that each can decode.
    max_running: int
    # Tokens that one step computes at most.
    max_step_tokens: int
    # Tokens that prompt and output may have together.
    max_model_len: int
    # Requests that wait while no place among the running ones is free for them.
    max_waiting: int
    # How many younger requests may be admitted before a waiting one that does not fit.
    max_overtakes: int = 32
    # A running request is left pages for so many more tokens when another one is admitted.
    growth_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_running", "max_step_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_waiting", "max_overtakes", "growth_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_length(self) -> int:
        """Tokens that prompt and output of one request have at most."""
        return min(self.max_model_len, self.pool_tokens)


class Rejected(Exception):  # noqa: N818 (an answer to the user, not a fault)
    """The request is not taken. `reason` is one of worker.proto's, `message` says what to do."""

    def __init__(self, reason: Literal["OVERLOADED", "KV_EXHAUSTED", "BAD_REQUEST"], message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raises `Rejected` for a request that would not run even if it were alone."""
    length = len(request.token_ids)
    if request.resumed < 0 or request.prompt_len < 1:
        raise Rejected(
            "BAD_REQUEST",
            f"of {length} tokens {request.resumed} are resumed: the prompt needs at least one of its own",
        )
    if request.max_tokens <= request.resumed:
        raise Rejected(
            "BAD_REQUEST",
            f"max_tokens is {request.max_tokens}, but {request.resumed} tokens were generated before:"
            " it must be larger",
        )
    if length >= config.max_model_len:
        raise Rejected(
            "BAD_REQUEST",
            f"{length} tokens leave no room for output in a context of {config.max_model_len}:"
            " shorten the prompt",
        )
    if length >= config.pool_tokens:
        raise Rejected(
            "KV_EXHAUSTED",
            f"{length} tokens do not fit in the KV cache, which holds {config.pool_tokens}:"
            " shorten the prompt, or give the worker more KV cache memory",
        )
