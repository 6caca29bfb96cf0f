"""Metrics of what happens with every token.

Those of the client library take locks, 3 us for a token. These belong to the thread of the event loop.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainCount:
    """A counter of one model."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class PlainCounter(Collector):
    """A counter by model."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._models: dict[str, PlainCount] = {}
        registry.register(self)

    def of(self, model: str) -> PlainCount:
        return self._models.setdefault(model, PlainCount())

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=["model"])
        for model, count in self._models.items():
            family.add_metric([model], count.value)
        yield family


class PlainBuckets:
    """A histogram of one model."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` include infinity."""
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class PlainHistogram(Collector):
    """A histogram by model."""

    def __init__(
        self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = (*buckets, math.inf)
        self._models: dict[str, PlainBuckets] = {}
        registry.register(self)

    def of(self, model: str) -> PlainBuckets:
        return self._models.setdefault(model, PlainBuckets(self._bounds))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model"])
        for model, seen in self._models.items():
            upto = zip(map(floatToGoString, self._bounds), accumulate(seen.counts), strict=True)
            family.add_metric([model], list(upto), seen.total)
        yield family
