"""The memory plan: weights and workspace first, then the KV cache; a refusal with numbers if it cannot be."""

from dataclasses import dataclass

from moebius_worker.host_memory import Memory

GIB = 1 << 30


class OutOfMemoryPlan(Exception):  # noqa: N818 - the name of a refusal, as `Rejected` is
    """The model does not fit. `permanent`: it would not, even if nobody else used memory."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class KvShare:
    """What the KV cache gets, unless told, of what weights and workspace leave: a share, up to a limit."""

    share: float
    limit: int | None


# A GPU is the worker's own, save what the driver and fragments take; the memory of a host is everybody's.
GPU_SHARE = KvShare(0.9, None)
HOST_SHARE = KvShare(0.25, 2 * GIB)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the model and the settings ask for, in bytes and tokens."""

    weights: int
    workspace: int
    page_bytes: int
    page_size: int
    # What the model was made for.
    context_len: int
    # What the user asked for; None leaves it to the plan.
    max_model_len: int | None
    kv_cache_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is taken, in bytes; `num_pages` pages and at most `max_model_len` tokens a request."""

    available: int
    weights: int
    workspace: int
    kv_cache: int
    num_pages: int
    max_model_len: int


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
    least = -(-least_tokens // demand.page_size) * demand.page_bytes
    wanted = max(least, demand.kv_cache_bytes or 0)
    if wanted > rest:
        raise OutOfMemoryPlan(
            f"The model does not fit: weights {_gib(demand.weights)} + workspace {_gib(demand.workspace)} + "
            f"KV cache {_gib(wanted)} = {_gib(fixed + wanted)}, but {_gib(memory.available)} of "
            f"{_gib(memory.total)} memory is available. Free or add memory, or ask for less: a smaller "
            "model, --dtype bfloat16, --kv-cache-memory, --max-model-len, --max-step-tokens.",
            permanent=fixed + wanted > memory.total,
        )
    if least > kv_bytes:
        if demand.kv_cache_bytes is not None:
            raise OutOfMemoryPlan(
                f"A KV cache of {_gib(kv_bytes)} does not hold one request of {least_tokens} tokens, which "
                f"needs {_gib(least)}. Raise --kv-cache-memory or lower --max-model-len.",
                permanent=True,
            )
        # Asked for a length, not for a size: the length may have more than the usual share.
        kv_bytes = least
    num_pages = kv_bytes // demand.page_bytes
    return MemoryPlan(
        available=memory.available,
        weights=demand.weights,
        workspace=demand.workspace,
        kv_cache=num_pages * demand.page_bytes,
        num_pages=num_pages,
        max_model_len=demand.max_model_len or min(demand.context_len, num_pages * demand.page_size),
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
