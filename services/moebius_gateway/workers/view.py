"""What the gateway knows about a worker at one moment, as plain data for decisions and for people."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from moebius_gateway.types import ModelInfo


class WorkerState(StrEnum):
    """`State` of worker.proto without its prefix, and `UNREACHABLE` for a worker that is not attached."""

    UNREACHABLE = "UNREACHABLE"
    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    RESTARTING = "RESTARTING"
    FAILED = "FAILED"


@dataclass(slots=True)
class Standing:
    """What a choice looks at of a worker that is ready. Its link keeps it as its view has it.

    Apart and small, for a choice meets several that were not looked at for a while, and that is its cost:
    each piece of them comes from memory, not from the CPU's cache.
    """

    address: str
    load: int = 0
    in_flight: int = 0
    # At least 1.
    max_running: int = 1
    max_model_len: int = 0
    on_trial: bool = False


class WorkerView(NamedTuple):
    """One worker, as of now."""

    address: str
    state: WorkerState
    # Of its pod; without one, its address.
    name: str = ""
    # For people: why it is not ready; what went wrong last.
    detail: str = ""
    # Empty until the worker was attached once.
    incarnation: str = ""
    # None until it is known, on this stream, what this incarnation serves.
    model: ModelInfo | None = None
    # Requests that this gateway has there.
    in_flight: int = 0
    # Requests that all gateways have there, by the last report and what was submitted since.
    load: int = 0
    max_running: int = 1
    # Tokens that its KV cache holds; 0 until it says so. Of them, about how many requests of others take.
    kv_tokens: int = 0
    foreign_kv_tokens: int = 0
    # Died repeatedly without a token in between: gets one request at a time until it delivers one.
    on_trial: bool = False
    # On the clock of time.monotonic(): ejected until then.
    ejected_until: float = 0.0

    def serves(self, model: ModelInfo, length: int = 0) -> bool:
        """Whether it is ready to generate for `model` after `length` tokens of prompt and output."""
        return (
            self.state is WorkerState.READY
            and self.model is not None
            and same_model(self.model, model)
            and length < self.model.max_model_len
        )

    def admits(self, now: float) -> bool:
        """Whether ejection lets a request through at `now`."""
        return not self.on_trial or (now >= self.ejected_until and self.in_flight == 0)


def same_model(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether token ids made for one can be continued by the other."""
    return one.id == other.id and one.tokenizer_hash == other.tokenizer_hash
