"""Plain data that scheduler, runner, sampler and loop pass to each other. No torch, no protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from moebius_worker.engine.grammar.matcher import MaskRow


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
    # The smaller, the more urgent.
    priority: int = 0
    # When it need not begin any more, on the clock of `Scheduler.schedule`, in seconds.
    deadline: float | None = None
    # What the output must spell, for the llguidance library; None: anything.
    grammar: str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids) - self.resumed


# Each step makes a slice and an output for each of its requests: named tuples are made in half the time that
# frozen data classes are.


class StateStep(NamedTuple):
    """Where a slice finds and leaves what linear-attention layers know of the text before it.

    `slot` is the request's own: layers go on from it and leave it as it is after the slice's last token.
    Before the slice, snapshot `restore` is copied into it, or, at position 0, it is zeroed. After the slice
    it is copied to snapshot `save`. Slots and snapshots are numbers of one pool.
    """

    slot: int
    restore: int | None = None
    save: int | None = None


class Slice(NamedTuple):
    """One request's part of a step: compute `token_ids` at positions `start`, `start + 1`, ...

    `pages` is the request's block table: page `pages[i]` holds positions `i * page_size` and on, and it
    reaches past the last position of the slice. Keys and values of all positions below `start` are in it.
    `window_pages` is the same for the layers that look back a window only, with -1 for pages that lie
    before it; empty if the model has no such layers. `state`: None if it has no linear-attention layers.
    In a step that is planned ahead of the one before, `token_ids` is `(~row,)`: what is drawn from that row
    of its logits.
    """

    handle: int
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    # The slice ends at the request's last known token, so its last row of logits is sampled.
    sample: bool
    window_pages: tuple[int, ...] = ()
    state: StateStep | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Rejected(Exception):  # noqa: N818 (an answer to the user, not a fault)
    """The request is not taken. `reason` is one of worker.proto's, `message` says what to do."""

    def __init__(
        self, reason: Literal["OVERLOADED", "KV_EXHAUSTED", "BAD_REQUEST", "DEADLINE"], message: str
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Empty when there is nothing to do."""

    slices: tuple[Slice, ...]
    # Waiting requests that ended with this step, by their handles, and why.
    refused: tuple[tuple[int, Rejected], ...] = ()

    @property
    def handles(self) -> tuple[int, ...]:
        return tuple(piece.handle for piece in self.slices)


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Output(NamedTuple):
    """What a step brought for one request."""

    handle: int
    token_ids: tuple[int, ...]
    finish: Finish | None
    # Prompt tokens that came from the prefix cache; set with the first output.
    cached_tokens: int = 0


class SampleRow(NamedTuple):
    """How one row of logits is sampled. `output_ids`: all generated before, but for `unknown` ones that the
    host has not seen yet; `banned`: ids not allowed now; `allowed`: if there is a grammar, those that it
    allows (and then the banned ones are taken off it)."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned: frozenset[int] = frozenset()
    allowed: "MaskRow | None" = None
    unknown: int = 0

    @property
    def position(self) -> int:
        """How many ids are generated before."""
        return len(self.output_ids) + self.unknown

    @property
    def plain(self) -> bool:
        """Only its logits, parameters and position count, and only its token is asked for."""
        params = self.params
        return not (
            self.banned
            or self.allowed is not None
            or params.logprobs is not None
            or params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs; `top` has the best first.

    After penalties and bias, before a grammar's mask, temperature and truncation: what the model thinks of
    the token, and not 0 wherever a grammar leaves no choice.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: Logprobs | None


class NonFiniteLogitsError(Exception):
    """The best logit of some rows is NaN or infinite: nothing can be drawn. `rows` are their indices."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"the logits of rows {', '.join(map(str, rows))} are not finite")
        self.rows = rows


class PoolStats(NamedTuple):
    """`used`: by requests. `cached`: kept for those to come, as long as nobody needs the place."""

    total: int = 0
    used: int = 0
    cached: int = 0


class CacheStats(NamedTuple):
    pages_total: int
    pages_used: int
    pages_cached: int
    window_pages: PoolStats = PoolStats()
    state_slots: PoolStats = PoolStats()


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    running: int
    waiting: int
    preemptions: int
    cached_tokens: int
    cache: CacheStats
