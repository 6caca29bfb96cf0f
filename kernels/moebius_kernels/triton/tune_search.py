"""The search for the best tiling of a product with so many tokens. Nothing here knows of a device."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from moebius_kernels.triton import dense_tiling, expert_tiling
from moebius_kernels.triton.dense_tiling import DenseMeasurement, DenseShape
from moebius_kernels.triton.expert_tiling import ExpertShape, Measurement
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.triton.tune_candidates import dense_candidates, expert_candidates
from moebius_kernels.triton.tune_points import shape_of
from moebius_kernels.triton.tune_process import TrialError
from moebius_kernels.tuning import Dropped, Point, Report, Trying, Tuned

T = TypeVar("T", ExpertTiling, Tiling)
Entry = Measurement | DenseMeasurement
# What answers (product, tokens, tiling) as `tune_trials.Trials` does. Raises TrialError.
Ask = Callable[[Any], Any]

# Candidates for down with which gate and up are tried, one after the other until some pair works.
_DOWNS_TRIED = 2


class _Search(Generic[T]):
    """Asks once for the figures of each tiling. `times`: microseconds of those that are right."""

    def __init__(self, point: Point, ask: Ask, report: Report) -> None:
        self._point, self._ask, self._report = point, ask, report
        self._tried: set[T] = set()
        self.times: dict[T, float] = {}

    def fastest(self, tilings: Iterable[T]) -> T | None:
        """Of these, None if none works."""
        some = list(tilings)
        for tiling in some:
            if tiling not in self._tried:
                self._try(tiling)
        return self._fastest(some)

    def finish(self, usual: T) -> T | None:
        """The fastest of all, which is told. `usual`: what there was before."""
        best = self._fastest(self.times)
        time = None if best is None else self.times[best]
        self._report(Tuned(self._point, "" if best is None else short(best), time, self.times.get(usual)))
        return best

    def _fastest(self, tilings: Iterable[T]) -> T | None:
        right = (tiling for tiling in tilings if tiling in self.times)
        return min(right, key=lambda tiling: self.times[tiling], default=None)

    def _try(self, tiling: T) -> None:
        self._tried.add(tiling)
        best = min(self.times.values(), default=None)
        self._report(Trying(self._point, len(self._tried), best))
        try:
            figures = self._ask((self._point.product, self._point.tokens, tiling))
        except TrialError as error:
            self._report(Dropped(self._point, short(tiling), str(error)))
            return
        if figures.microseconds is None:
            self._report(Dropped(self._point, short(tiling), f"wrong numbers, error {figures.error:.1e}"))
        else:
            self.times[tiling] = figures.microseconds


def search(point: Point, ask: Ask, report: Report) -> Entry | None:
    """The best tiling of a point; None if none works."""
    shape, tokens = shape_of(point.product), point.tokens
    if isinstance(shape, ExpertShape):
        experts: _Search[ExpertTiling] = _Search(point, ask, report)
        both = _search_experts(experts, shape, tokens)
        return None if both is None else Measurement(shape, tokens, experts.times[both], both)
    assert isinstance(shape, DenseShape), shape
    dense: _Search[Tiling] = _Search(point, ask, report)
    one = _search_dense(dense, shape, tokens)
    return None if one is None else DenseMeasurement(shape, tokens, dense.times[one], one)


def _search_experts(search: _Search[ExpertTiling], shape: ExpertShape, tokens: int) -> ExpertTiling | None:
    """For each height of tiles gate and up first, then down beside the best of these."""
    usual = expert_tiling.expert_tiling(tokens, shape)
    search.fastest((usual, expert_tiling.rules(tokens, shape)))
    for gate_ups, downs in expert_candidates(shape, tokens):
        for down in downs[:_DOWNS_TRIED]:
            first = search.fastest(ExpertTiling(one, down) for one in gate_ups)
            if first is not None:
                search.fastest(ExpertTiling(first.gate_up, one) for one in downs)
                break
    return search.finish(usual)


def _search_dense(search: _Search[Tiling], shape: DenseShape, tokens: int) -> Tiling | None:
    usual = dense_tiling.dense_tiling(tokens, shape)
    best = search.fastest((usual, dense_tiling.rules(tokens, shape), *dense_candidates(shape, tokens)))
    if best is not None:
        search.fastest([replace(best, prefetch=True)])
    return search.finish(usual)


def to_compile(point: Point) -> Iterator[ExpertTiling | Tiling]:
    """Tilings that together have all kernels that a search will surely need."""
    shape, tokens = shape_of(point.product), point.tokens
    if isinstance(shape, ExpertShape):
        yield expert_tiling.expert_tiling(tokens, shape)
        yield expert_tiling.rules(tokens, shape)
        for gate_ups, downs in expert_candidates(shape, tokens):
            for gate_up, down in zip_longest(gate_ups, downs):
                yield ExpertTiling(gate_up or gate_ups[0], down or downs[0])
    elif isinstance(shape, DenseShape):
        yield dense_tiling.dense_tiling(tokens, shape)
        yield dense_tiling.rules(tokens, shape)
        yield from dense_candidates(shape, tokens)


def short(tiling: ExpertTiling | Tiling) -> str:
    """For people: tokens x rows x columns, warps, stages, and what is not usual."""
    if isinstance(tiling, ExpertTiling):
        return f"{short(tiling.gate_up)} | {short(tiling.down)}"
    extras = {"k": tiling.splits, "d": tiling.depth, "p": tiling.parts}
    words = [f"{tiling.tokens}x{tiling.rows}x{tiling.columns} w{tiling.warps} s{tiling.stages}"]
    words += [f"{name}{value}" for name, value in extras.items() if value > 1]
    words += [f"r{tiling.registers}"] if tiling.registers else []
    return " ".join(words + ["plain"] * (not tiling.swap) + ["prefetch"] * tiling.prefetch)
