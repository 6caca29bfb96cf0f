"""The record of one generation: all that is needed to go on with it on any worker, at the token where it was.

A record is written by its dispatcher loop alone. Decisions over it are in recovery.py.
"""

from dataclasses import dataclass, field, replace

from moebius_common.backoff import backoff
from moebius_gateway.types import FinishReason, Generation, ModelInfo, Reason, Sampling, Tokens

# Suspected deaths in a row, without a token in between, after which a request is computed alone.
QUARANTINE_STRIKES = 2
# Before the same incarnation that failed a request is tried again with it, in seconds: doubled with each
# death in a row. Whoever else is ready is tried at once.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
# For refusals that do not say when to come back, in seconds.
REFUSAL_PAUSE = 0.25

DEATHS = frozenset({Reason.ENGINE_DEAD, Reason.ENGINE_STALLED, Reason.GPU_FAULT})


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt at a generation; the fields are those of `Submit` in worker.proto."""

    handle: int
    request_id: str
    token_ids: tuple[int, ...]
    resumed: int
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    quarantined: bool
    grammar: str | None = None
    priority: int = 0
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended without a finish reason. `retry_after` is in seconds."""

    worker: str
    incarnation: str
    reason: Reason
    message: str
    retry_after: float = 0.0
    # The request was part of the step that died; None when nobody knows (stream reset, silence).
    in_step: bool | None = False
    # Tokens that the worker had sent by then, `resumed` included; None when nobody knows.
    tokens_sent: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """What a worker last did to a request: refused it, or died under it."""

    incarnation: str
    reason: Reason
    # On the clock of time.monotonic(): this incarnation is not asked again before.
    until: float


@dataclass(slots=True)
class Record:
    """One generation, what was delivered of it, and what befell it."""

    generation: Generation
    # As of the generation's start: all attempts must speak its tokens.
    model: ModelInfo
    # Seconds for which full workers may put it off before it is refused.
    max_wait: float = 60.0
    delivered: list[int] = field(default_factory=list)
    # Deaths of workers under it, and those of which it is suspected; both since the last new token.
    deaths: int = 0
    strikes: int = 0
    # It lost a worker that had taken it: from then on backpressure may delay it but not end it.
    displaced: bool = False
    # The attempt that runs was submitted as quarantined.
    alone: bool = False
    quarantines: int = 0
    marks: dict[str, Mark] = field(default_factory=dict)
    # When a full worker first refused it, on the clock of time.monotonic().
    refused_at: float | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.generation.prompt_ids) + len(self.delivered)

    def submit(self, handle: int, now: float) -> Submission:
        """Begins an attempt named `handle` that continues after the delivered tokens."""
        quarantined = self.strikes >= QUARANTINE_STRIKES
        self.quarantines += quarantined and not self.alone
        self.alone = quarantined
        generation = self.generation
        return Submission(
            handle=handle,
            request_id=generation.request_id,
            token_ids=(*generation.prompt_ids, *self.delivered),
            resumed=len(self.delivered),
            sampling=generation.sampling,
            max_tokens=generation.max_tokens,
            min_tokens=generation.min_tokens,
            stop_token_ids=generation.stop_token_ids,
            quarantined=quarantined,
            grammar=generation.grammar,
            priority=generation.priority,
            # What was begun once shall not wait in vain a second time: the gateway's own clock ends it.
            deadline_ms=0 if self.displaced else _milliseconds(generation.deadline - now),
        )

    def deliver(self, tokens: Tokens) -> Tokens:
        """Takes what the running attempt brought; returns it as the client shall see it.

        Prefix hits are those of the attempt that brought the first token: later ones find their own
        output. A new token is an alibi: a request that kills engines does so again at the same position.
        """
        if self.delivered and tokens.cached_tokens:
            tokens = replace(tokens, cached_tokens=0)
        if tokens.token_ids:
            self.delivered += tokens.token_ids
            self.deaths = self.strikes = 0
        return tokens

    def may_rejoin(self) -> bool:
        """Whether the attempt that runs alone has proved itself and should go on among others.

        Once only: requests that kill nothing alone, but die together whenever they meet, stay apart the
        second time.
        """
        return self.alone and self.strikes == 0 and self.quarantines == 1

    def note(self, failure: Failure, now: float) -> bool:
        """Writes down that the running attempt failed; returns whether that was a strike."""
        if failure.reason in DEATHS:
            pause = backoff(FIRST_PAUSE, self.deaths, LONGEST_PAUSE)
            self.deaths += 1
        else:
            pause = failure.retry_after or REFUSAL_PAUSE
        if failure.reason is Reason.OVERLOADED and self.refused_at is None:
            self.refused_at = now
        self.displaced = self.displaced or failure.reason in DEATHS or bool(self.delivered)
        self.marks[failure.worker] = Mark(failure.incarnation, failure.reason, now + pause)
        strike = failure.reason in DEATHS and failure.in_step is not False
        self.strikes += strike
        return strike

    def finish_reason(self) -> FinishReason | None:
        """Set when the delivered tokens are the whole generation, though no worker lived to say so."""
        if self.delivered and self.delivered[-1] in self.generation.stop_token_ids:
            return FinishReason.STOP
        if len(self.delivered) >= self.generation.max_tokens:
            return FinishReason.LENGTH
        return None


def _milliseconds(seconds: float) -> int:
    """As the protocol has them: at least one, for none means no limit."""
    return min(max(1, round(1000 * seconds)), 2**32 - 1)
