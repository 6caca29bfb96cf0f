"""Plain data that scheduler, runner, sampler and loop pass to each other. No torch, no protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn; the fields are those of `Sampling` in worker.proto, where they are explained."""

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
class Request:
    """A request as submitted. `token_ids` is the prompt and, after it, `resumed` ids generated before."""

    handle: int
    request_id: str
    token_ids: tuple[int, ...]
    resumed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    quarantined: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids) - self.resumed


@dataclass(frozen=True, slots=True)
class Slice:
    """One request's part of a step: compute `token_ids` at positions `start`, `start + 1`, ...

    `pages` is the request's block table: page `pages[i]` holds positions `i * page_size` and on, and it
    reaches past the last position of the slice. Keys and values of all positions below `start` are in it.
    """

    handle: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    # The slice ends at the request's last known token, so its last row of logits is sampled.
    sample: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Empty when there is nothing to do."""

    slices: tuple[Slice, ...]

    @property
    def handles(self) -> tuple[int, ...]:
        return tuple(piece.handle for piece in self.slices)


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought for one request."""

    handle: int
    token_ids: tuple[int, ...]
    finish: Finish | None
    # Prompt tokens that came from the prefix cache; set with the first output.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    pages_total: int
    pages_used: int
    pages_cached: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    running: int
    waiting: int
    preemptions: int
    cached_tokens: int
    cache: CacheStats
