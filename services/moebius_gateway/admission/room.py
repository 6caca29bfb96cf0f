"""What the ready workers of a model can take: sequences, and tokens in their KV caches."""

from collections.abc import Iterable
from dataclasses import dataclass

from moebius_gateway.workers.view import WorkerView

# Of a worker's places, so many more are filled from here: those wait in the worker, which so never idles
# between a sequence's end and the next one's arrival.
AHEAD = 8


@dataclass(frozen=True, slots=True)
class Room:
    """What this gateway may have there; requests of other gateways are taken off."""

    sequences: int = 0
    # None if a worker does not say how large its cache is.
    tokens: int | None = 0

    @property
    def none(self) -> bool:
        """No worker is ready."""
        return self.sequences == 0

    def fits(self, sequences: int, tokens: int, cost: int) -> bool:
        """Whether another sequence of `cost` tokens fits beside those that are there.

        Where there is none it always does: whether it is too large alone is the worker's word.
        """
        if self.none:
            return False
        if sequences == 0:
            return True
        return sequences < self.sequences and (self.tokens is None or tokens + cost <= self.tokens)


def room(workers: Iterable[WorkerView]) -> Room:
    """`workers`: those that are ready for the model."""
    sequences, tokens = 0, 0
    known = True
    for worker in workers:
        foreign = worker.load - worker.in_flight
        sequences += max(worker.max_running + max(1, worker.max_running // AHEAD) - foreign, 1)
        tokens += max(worker.kv_tokens - worker.foreign_kv_tokens, 0)
        known = known and worker.kv_tokens > 0
    return Room(sequences, tokens if known else None)
