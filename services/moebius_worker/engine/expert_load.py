"""How evenly a model's experts are used, from some of its steps: the others pay nothing for it.

A step that is replayed from a CUDA graph cannot be looked into, so on a GPU only steps with a prefill are
watched. What is counted is read when the device is about to be waited for anyway, since the step's tokens are
drawn.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from moebius_kernels.operations import Operations, Router
from moebius_kernels.router import Route
from moebius_proto.worker.v1 import engine_pb2

INTERVAL_SECONDS = 10.0
# So many tokens of a mean expert are enough to tell an uneven router from chance: of 128 even experts the
# busiest has about half again as many.
ENOUGH = 32


class ExpertLoad:
    """Counts where routers send tokens, in one step of each `interval` seconds."""

    def __init__(self, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        self._next = time.monotonic() + interval
        # Experts of each router's call in the step that is watched, with the number that there are.
        self._seen: list[tuple[torch.Tensor, int]] = []
        # [layers, experts], since the last use that was told.
        self._counts: torch.Tensor | None = None
        self._use: engine_pb2.ExpertUse | None = None

    def due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def watched(self, ops: Operations) -> Iterator[Operations]:
        """`ops` whose routers are watched, for one step."""
        self._next = time.monotonic() + self._interval
        self._seen.clear()
        yield replace(
            ops,
            topk_softmax=self._noting(ops.topk_softmax),
            softmax_topk=self._noting(ops.softmax_topk),
            sigmoid_topk=self._noting(ops.sigmoid_topk),
        )
        # An expert -1 is none. Where layers differ in the number of experts, nothing is told.
        if len({total for _, total in self._seen}) == 1:
            self._add(torch.stack([_counts(experts, total) for experts, total in self._seen]).cpu())
        self._seen.clear()

    def take(self) -> engine_pb2.ExpertUse | None:
        """What was found since the last call, if enough was seen."""
        use, self._use = self._use, None
        return use

    def _noting(self, router: Router) -> Router:
        def noting(logits: torch.Tensor, *rest: object, **settings: object) -> Route:
            route = router(logits, *rest, **settings)
            self._seen.append((route.experts, logits.shape[-1]))
            return route

        return noting

    def _add(self, counts: torch.Tensor) -> None:
        if self._counts is None or self._counts.shape != counts.shape:
            self._counts = torch.zeros_like(counts)
        self._counts += counts
        means = self._counts.double().mean(dim=-1)
        if means.min() >= ENOUGH:
            imbalance = self._counts.max(dim=-1).values / means
            idle = int((self._counts == 0).sum())
            self._use = engine_pb2.ExpertUse(imbalance=imbalance.tolist(), idle=idle)
            self._counts = None


def _counts(experts: torch.Tensor, total: int) -> torch.Tensor:
    """How many of `experts` are each of [0, total). Unlike bincount, it does not wait for the device."""
    flat = experts.flatten().long() + 1
    counts = torch.zeros(total + 1, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]
