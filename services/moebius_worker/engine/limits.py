"""How much a scheduler takes: its sizes, and the requests that it can never run."""

from dataclasses import dataclass

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.types import Rejected, Request

# Priorities are from -MAX_PRIORITY to MAX_PRIORITY: how long the least urgent may have to wait has an end.
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    layout: CacheLayout
    # Requests that hold pages at a time; fewer are used if not each of them could decode in each step.
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
    # Tokens of a prompt between two snapshots of what linear-attention layers know, if there are such layers;
    # and between two positions whose window pages are kept first, if there are layers with a window.
    snapshot_interval: int = 512
    # Attended keys that take as long as the rest of one token does.
    keys_per_token: int = 8192

    def __post_init__(self) -> None:
        for name in (
            "max_running",
            "max_step_tokens",
            "max_model_len",
            "snapshot_interval",
            "keys_per_token",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_waiting", "max_overtakes", "growth_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")

    @property
    def places(self) -> int:
        """Requests that run at a time: each can compute a token in each step, and has a state slot.

        Up to half of the window pages are left for the chunks of prefills.
        """
        layout = self.layout
        places = min(self.max_running, self.max_step_tokens)
        if layout.state_slots:
            places = min(places, layout.state_slots)
        if layout.window is not None:
            chunk = min(-(-self.max_step_tokens // layout.page_size), layout.num_window_pages // 2)
            places = min(places, max(1, (layout.num_window_pages - chunk) // layout.window_reach))
        return places

    @property
    def step_tokens(self) -> int:
        """Tokens that a step computes, at most: the window pages suffice for them, whoever they belong to."""
        layout = self.layout
        if layout.window is None:
            return self.max_step_tokens
        spare = layout.num_window_pages - self.places * layout.window_reach
        return min(self.max_step_tokens, max(self.places, spare * layout.page_size))

    @property
    def spare_stops(self) -> int:
        """Positions of texts that are not running for which what their layers look back to can be kept."""
        layout = self.layout
        spare = [layout.state_slots - self.places] if layout.state_slots else []
        if layout.window is not None:
            spare.append(layout.num_window_pages // layout.window_reach - self.places)
        return min(spare, default=0)

    @property
    def max_length(self) -> int:
        """Tokens that prompt and output of one request have at most."""
        return min(self.max_model_len, self.layout.pool_tokens)


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
    if abs(request.priority) > MAX_PRIORITY:
        raise Rejected(
            "BAD_REQUEST",
            f"the priority is {request.priority}: it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}",
        )
    if length >= config.layout.pool_tokens:
        raise Rejected(
            "KV_EXHAUSTED",
            f"{length} tokens do not fit in the KV cache, which holds {config.layout.pool_tokens}:"
            " shorten the prompt, or give the worker more KV cache memory",
        )
