"""The memory plan: weights and workspace first, then the caches; a refusal with numbers if it cannot be."""

from dataclasses import dataclass
from typing import NamedTuple

from moebius_worker.engine.cache.layout import CacheLayout, window_reach
from moebius_worker.host_memory import Memory

GIB = 1 << 30

# Of what the caches have beyond the needs of one request, window pages and state slots get a third each at
# most: the pages of the whole text are what bounds its length.
_SIDE_SHARE = 1 / 3
# Window pages and state slots are wanted for the running requests and, so many times more, for what is kept
# of texts that may come again: their last windows, and two snapshots each.
_KEPT_WINDOWS = 1
_KEPT_SNAPSHOTS = 2


class OutOfMemoryPlan(Exception):  # noqa: N818 - the name of a refusal, as `Rejected` is
    """The model does not fit. `permanent`: it would not, even if nobody else used memory."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class KvShare:
    """What the caches get, unless told, of what weights and workspace leave: a share, up to a limit."""

    share: float
    limit: int | None


# A GPU is the worker's own, save what the driver and fragments take; the memory of a host is everybody's.
GPU_SHARE = KvShare(0.9, None)
HOST_SHARE = KvShare(0.25, 2 * GIB)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the model and the settings ask for, in bytes and tokens.

    The fields from `window` on are those of models with sliding-window or linear-attention layers.
    """

    weights: int
    workspace: int
    # A page of all layers that see the whole text; 0 if there are none.
    page_bytes: int
    page_size: int
    # What the model was made for.
    context_len: int
    # What the user asked for; None leaves it to the plan.
    max_model_len: int | None
    kv_cache_bytes: int | None
    # How far back, itself included, a position sees in layers with a window; a page of all of those.
    window: int | None = None
    window_page_bytes: int = 0
    # A slot of all linear-attention layers; 0 if there are none.
    state_slot_bytes: int = 0
    # Requests at a time, and tokens of the largest step.
    max_running: int = 1
    max_step_tokens: int = 1
    # Whether the workspace is what steps took, not an estimate.
    measured: bool = False

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is taken of `available` bytes; at most `max_model_len` tokens a request."""

    available: int
    demand: Demand
    layout: CacheLayout
    max_model_len: int

    @property
    def num_pages(self) -> int:
        return self.layout.num_pages

    @property
    def kv_cache(self) -> int:
        """Bytes of all caches."""
        layout = self.layout
        return _nbytes(self.demand, _Pools(layout.num_pages, layout.num_window_pages, layout.state_slots))


class _Pools(NamedTuple):
    pages: int
    window_pages: int
    state_slots: int


def check_host(nbytes: int, memory: Memory) -> None:
    """Raises OutOfMemoryPlan if the tables that stay in the host's memory beside a GPU do not fit."""
    if nbytes > memory.available:
        raise OutOfMemoryPlan(
            f"The model does not fit: it keeps {_gib(nbytes)} in the host's memory, but "
            f"{_gib(memory.available)} of {_gib(memory.total)} is available.",
            permanent=nbytes > memory.total,
        )


def plan_memory(demand: Demand, memory: Memory, kv_share: KvShare) -> MemoryPlan:
    """Divides `memory`. Raises OutOfMemoryPlan."""
    fixed = demand.weights + demand.workspace
    rest = memory.available - fixed
    if demand.kv_cache_bytes is not None:
        kv_bytes = demand.kv_cache_bytes
    else:
        kv_bytes = int(max(0, rest) * kv_share.share)
        kv_bytes = kv_bytes if kv_share.limit is None else min(kv_bytes, kv_share.limit)
    least_tokens = demand.max_model_len or demand.page_size
    least = _least(demand, least_tokens)
    least_bytes = _nbytes(demand, least)
    wanted = max(least_bytes, demand.kv_cache_bytes or 0)
    if wanted > rest:
        raise OutOfMemoryPlan(
            f"The model does not fit: weights {_gib(demand.weights)} + workspace {_gib(demand.workspace)} + "
            f"KV cache {_gib(wanted)} = {_gib(fixed + wanted)}, but {_gib(memory.available)} of "
            f"{_gib(memory.total)} memory is available. Free or add memory, or ask for less: a smaller "
            "model, --dtype bfloat16, --kv-cache-memory, --max-model-len, --max-step-tokens.",
            permanent=fixed + wanted > memory.total,
        )
    if least_bytes > kv_bytes:
        if demand.kv_cache_bytes is not None:
            raise OutOfMemoryPlan(
                f"A KV cache of {_size(kv_bytes)} does not hold one request of {least_tokens} tokens, which "
                f"needs {_size(least_bytes)}. Raise --kv-cache-memory or lower --max-model-len.",
                permanent=True,
            )
        # Asked for a length, not for a size: the length may have more than the usual share.
        kv_bytes = least_bytes
    pools = _divide(demand, least, kv_bytes)
    layout = CacheLayout(
        page_size=demand.page_size,
        num_pages=pools.pages,
        window=demand.window,
        num_window_pages=pools.window_pages,
        state_slots=pools.state_slots,
    )
    return MemoryPlan(
        available=memory.available,
        demand=demand,
        layout=layout,
        max_model_len=demand.max_model_len or min(demand.context_len, layout.pool_tokens),
    )


def plan_table(plan: MemoryPlan) -> str:
    """The plan for people: a line for each thing that takes memory, and its share of what is available."""
    demand, layout = plan.demand, plan.layout
    rows = [
        ("weights", "", demand.weights),
        ("workspace", "measured" if demand.measured else "estimated", demand.workspace),
        *(
            (name, f"{count} x {_size(each)}", count * each)
            for name, count, each in (
                (f"pages of {demand.page_size} tokens", layout.num_pages, demand.page_bytes),
                (f"pages of a window of {demand.window}", layout.num_window_pages, demand.window_page_bytes),
                ("state slots", layout.state_slots, demand.state_slot_bytes),
            )
            if each
        ),
    ]
    rows.append(("left", "", plan.available - sum(size for _, _, size in rows)))
    rows.append(("available", "", plan.available))
    return "\n".join(
        f"{name:<26}{detail:>22}{_size(size):>14}{size / max(1, plan.available):>9.1%}"
        for name, detail, size in rows
    )


def _nbytes(demand: Demand, pools: _Pools) -> int:
    return (
        pools.pages * demand.page_bytes
        + pools.window_pages * demand.window_page_bytes
        + pools.state_slots * demand.state_slot_bytes
    )


def _least(demand: Demand, tokens: int) -> _Pools:
    """What one request of `tokens` tokens takes, computed page by page if need be."""
    window_pages = 0
    if demand.window is not None:
        window_pages = window_reach(demand.window, demand.page_size) + 1
    return _Pools(demand.pages_for(tokens), window_pages, 1 if demand.state_slot_bytes else 0)


def _divide(demand: Demand, least: _Pools, kv_bytes: int) -> _Pools:
    """Pools of `kv_bytes` together, each at least as in `least`."""
    side_bytes = int((kv_bytes - _nbytes(demand, least)) * _SIDE_SHARE)

    def side(least_count: int, wanted: int, each: int) -> int:
        more = min(max(0, wanted - least_count), side_bytes // each) if each else 0
        return least_count + more

    chunk = demand.pages_for(demand.max_step_tokens)
    wanted_windows = chunk
    if demand.window is not None:
        reach = min(window_reach(demand.window, demand.page_size), demand.pages_for(demand.context_len))
        wanted_windows += demand.max_running * reach * (1 + _KEPT_WINDOWS)
    window_pages = side(least.window_pages, wanted_windows, demand.window_page_bytes)
    slots = side(least.state_slots, demand.max_running * (1 + _KEPT_SNAPSHOTS), demand.state_slot_bytes)
    beside = _nbytes(demand, _Pools(0, window_pages, slots))
    if demand.page_bytes:
        pages = (kv_bytes - beside) // demand.page_bytes
    else:
        # They are numbers only.
        pages = demand.max_running * demand.pages_for(demand.max_model_len or demand.context_len)
    return _Pools(pages, window_pages, slots)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _size(size: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"
