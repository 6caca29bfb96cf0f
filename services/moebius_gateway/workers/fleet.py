"""The workers by what they can do now, kept up to date worker by worker: a decision looks at few of many."""

import random
from collections.abc import Iterable, Mapping, Sequence

from moebius_gateway.types import ModelInfo
from moebius_gateway.workers.view import Standing, WorkerState, WorkerView

# A new request is placed on the best of those that have some of its prefix and so many others, neighbours in
# no order from a place drawn anew: the best of eight is nearly as good as the best of all, and no decision
# grows with the fleet.
SAMPLE = 8

# Ids of workers' models and of their tokenizers: token ids made for one can be continued by the other.
Kind = tuple[str, str]


class _Pool:
    """Members in no order, any of which can be taken out or drawn in O(1)."""

    def __init__(self) -> None:
        self.members: list[Standing] = []
        self.places: dict[str, int] = {}

    def add(self, worker: Standing) -> None:
        if worker.address not in self.places:
            self.places[worker.address] = len(self.members)
            self.members.append(worker)

    def discard(self, worker: Standing) -> None:
        place = self.places.pop(worker.address, None)
        if place is None:
            return
        last = self.members.pop()
        if last is not worker:
            self.members[place] = last
            self.places[last.address] = place


class Fleet:
    """Says which workers are ready for a model, and which of them are worth a look."""

    def __init__(self) -> None:
        self._pools: dict[Kind, _Pool] = {}
        self._ready: dict[str, Kind] = {}
        self._served: dict[str, ModelInfo] = {}

    def update(self, worker: Standing, view: WorkerView) -> bool:
        """Takes in how a worker is now. Returns whether it serves something else than before."""
        model = view.model if view.state is not WorkerState.UNREACHABLE else None
        before = self._served.get(view.address)
        if model is None:
            self._served.pop(view.address, None)
        else:
            self._served[view.address] = model
        self._move(worker, _kind(model) if model and view.state is WorkerState.READY else None)
        return model != before

    def served(self) -> Iterable[ModelInfo]:
        """What the workers that are attached serve, one entry for each."""
        return self._served.values()

    def ready(self, model: ModelInfo) -> Sequence[Standing]:
        pool = self._pools.get(_kind(model))
        return pool.members if pool is not None else ()

    def candidates(self, model: ModelInfo, matched: Mapping[str, int]) -> Sequence[Standing]:
        """Those of the ready ones that a new request may go to; `matched`: who has some of its prefix."""
        pool = self._pools.get(_kind(model))
        if pool is None:
            return ()
        members, places, count = pool.members, pool.places, len(pool.members)
        if count <= SAMPLE:
            return members
        first = int(random.random() * count)
        # Round the end.
        chosen = members[first : first + SAMPLE] + members[: max(first + SAMPLE - count, 0)]
        chosen += [members[places[address]] for address in matched if address in places]
        return chosen

    def _move(self, worker: Standing, kind: Kind | None) -> None:
        before = self._ready.get(worker.address)
        if before == kind:
            return
        if before is not None:
            self._pools[before].discard(worker)
            if not self._pools[before].members:
                del self._pools[before]
            del self._ready[worker.address]
        if kind is not None:
            self._pools.setdefault(kind, _Pool()).add(worker)
            self._ready[worker.address] = kind


def _kind(model: ModelInfo) -> Kind:
    return model.id, model.tokenizer_hash
