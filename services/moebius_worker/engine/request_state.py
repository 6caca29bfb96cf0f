"""What the scheduler knows about one request, and how a request moves on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moebius_worker.engine.cache.manager import BlockTable
from moebius_worker.engine.types import Finish, Output, Request


@dataclass(eq=False, slots=True)
class RequestState:
    """A request that is waiting, running, or over while a step with it is under way."""

    request: Request
    # Its place in the order of requests: one with a smaller rank goes first and is preempted last.
    rank: tuple[int, int]
    # Prompt and output together end with LENGTH at so many tokens.
    limit: int
    table: BlockTable
    running: bool = False
    # It has been running at some time.
    begun: bool = False
    over: bool = False
    # Positions whose keys and values are in the pages of `table`.
    computed: int = 0
    # The highest value that `computed` ever had: what a preempted request finds in the tree below this
    # position was its own work.
    reached: int = 0
    # Prompt tokens that were found in the cache, until the first output tells.
    cached_tokens: int = 0
    # The last step that admitted or computed it.
    last_step: int = 0
    # While waiting: younger requests that were admitted before it (as many as may be, once preempted).
    overtaken: int = 0
    # While waiting: pages needed at the last look, and the step from which the next look is due.
    need: int = 0
    look_again: int = 0
    handle: int = field(init=False)
    quarantined: bool = field(init=False)
    # All known tokens; those of them that were generated (resumed ones included), and the others.
    tokens: list[int] = field(init=False)
    outputs: list[int] = field(init=False)
    prompt_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        prompt_len = self.request.prompt_len
        self.handle = self.request.handle
        self.quarantined = self.request.quarantined
        self.tokens = list(self.request.token_ids)
        self.outputs = self.tokens[prompt_len:]
        self.prompt_ids = self.request.token_ids[:prompt_len]

    @property
    def pending(self) -> int:
        """Known tokens that are still to be computed; 1 when decoding."""
        return len(self.tokens) - self.computed

    @property
    def latest_start(self) -> float:
        """When it need not be admitted any more; a client that has had a part of the text gets the rest."""
        deadline = self.request.deadline
        return math.inf if deadline is None or self.begun else deadline

    def skip_to(self, position: int) -> int:
        """The cache holds all positions below `position`; returns how many prompt tokens that saved."""
        saved = max(0, min(position, self.request.prompt_len) - self.reached)
        self.cached_tokens += saved
        self.advance_to(max(position, self.computed))
        return saved

    def advance_to(self, position: int) -> None:
        self.computed = position
        if position > self.reached:
            self.reached = position

    def accept(self, sampled: Sequence[int], *, whole: bool = False) -> Output:
        """Appends `sampled` up to the token that ends the request; those after it are dropped.

        `whole`: nothing can follow them.
        """
        request, tokens, outputs = self.request, self.tokens, self.outputs
        accepted = tuple(sampled)
        finish: Finish | None = None
        for count, token in enumerate(accepted, 1):
            tokens.append(token)
            outputs.append(token)
            if token in request.stop_token_ids and len(outputs) > request.min_tokens:
                finish = Finish.STOP
            elif len(tokens) >= self.limit:
                finish = Finish.LENGTH
            if finish is not None:
                accepted = accepted[:count]
                break
        if whole:
            finish = Finish.STOP
        cached_tokens, self.cached_tokens = self.cached_tokens, 0
        return Output(self.handle, accepted, finish, cached_tokens)
