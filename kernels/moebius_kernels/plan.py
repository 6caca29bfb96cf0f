"""The plan: which backend computes which calls at which token counts, and why the others do not."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Self

from moebius_kernels.calls import CALLS
from moebius_kernels.registry import TokenRange


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a candidate. `rejected`: the gate it failed at and `reason`, both None if it passed.

    `error`: relative, against the reference. `microseconds`: the median of a call at the range's last count.
    `captured`: it has been replayed from a CUDA graph; False if it was not tried.
    """

    backend: str
    rejected: str | None = None
    reason: str | None = None
    error: float | None = None
    microseconds: float | None = None
    captured: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """For the calls of a site at a range of token counts. `captured`: it may be part of a CUDA graph."""

    operation: str
    key: str
    tokens: TokenRange
    backend: str
    captured: bool
    verdicts: tuple[Verdict, ...]

    @property
    def rejections(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.rejected)


@dataclass(frozen=True, slots=True)
class Plan:
    """`identity`: for what it was made: device, versions, kernels, shapes."""

    choices: tuple[Choice, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def backends(self) -> Counter[str]:
        """How many choices fell on each "operation:name"."""
        return Counter(f"{choice.operation}:{choice.backend}" for choice in self.choices)

    @property
    def rejections(self) -> Counter[tuple[str, str]]:
        """How many, by "operation:name" and gate."""
        return Counter(
            (f"{choice.operation}:{verdict.backend}", verdict.rejected)
            for choice in self.choices
            for verdict in choice.verdicts
            if verdict.rejected is not None
        )

    def capturable(self, tokens: int) -> bool:
        """Whether a step of so many tokens may be a CUDA graph."""
        return all(
            choice.captured
            for choice in self.choices
            if CALLS[choice.operation].in_graphs and choice.tokens.first <= tokens <= choice.tokens.last
        )

    def without(self, excluded: Collection[str]) -> "Plan":
        """Chosen again, without the backends named "operation:backend"; references stay."""

        def again(choice: Choice) -> Choice:
            verdicts = [
                one
                for one in choice.verdicts
                if one.backend == "reference" or f"{choice.operation}:{one.backend}" not in excluded
            ]
            capture = any(one.captured for one in choice.verdicts)
            return choose(choice.operation, choice.key, choice.tokens, verdicts, capture=capture)

        return Plan(tuple(map(again, self.choices)), self.identity)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError for what no plan of this version wrote."""
        try:
            found = json.loads(text)
            return cls(tuple(map(_choice, found["choices"])), dict(found["identity"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no plan: {type(error).__name__}: {error}") from error


def choose(
    operation: str, key: str, tokens: TokenRange, verdicts: Sequence[Verdict], *, capture: bool
) -> Choice:
    """The fastest that passed; if none did, the reference, uncaptured.

    `capture`: steps of this range are to be CUDA graphs, so one that can be part of them comes first.
    """
    passed = [verdict for verdict in verdicts if verdict.rejected is None]
    best = min(
        passed,
        key=lambda one: (capture and not one.captured, one.microseconds is None, one.microseconds or 0.0),
        default=Verdict("reference"),
    )
    return Choice(operation, key, tokens, best.backend, best.captured, tuple(verdicts))


def token_ranges(largest: int, running: int = 1) -> tuple[TokenRange, ...]:
    """1, 2, 3-4, 5-8 and so on to `largest`. One ends at `running`, the most requests that a step of decodes
    has."""
    powers = [1]
    while powers[-1] < largest:
        powers.append(2 * powers[-1])
    lasts = sorted({*powers[:-1], min(running, largest), largest})
    return tuple(TokenRange(before + 1, last) for before, last in pairwise([0, *lasts]))


def rows_of(plan: Plan) -> list[tuple[str, ...]]:
    """The plan as a table: operation, key, tokens, backend, time, error, rejections. Neighbouring ranges with
    the same outcome are one row."""
    rows: list[tuple[str, ...]] = []
    for group in _runs(plan.choices):
        first, last = group[0], group[-1]
        chosen = [
            verdict for choice in group for verdict in choice.verdicts if verdict.backend == choice.backend
        ]
        times = [one.microseconds for one in chosen if one.microseconds is not None]
        errors = [one.error for one in chosen if one.error is not None]
        rows.append(
            (
                first.operation,
                first.key,
                str(TokenRange(first.tokens.first, last.tokens.last)),
                first.backend + ("" if first.captured else " (no graph)"),
                _span([f"{time:.0f}" for time in times]),
                f"{max(errors):.1e}" if errors else "",
                "; ".join(dict.fromkeys(f"{one.backend}: {one.reason}" for one in first.rejections)),
            )
        )
    return rows


def _runs(choices: Iterable[Choice]) -> list[list[Choice]]:
    runs: list[list[Choice]] = []
    ordered = sorted(choices, key=lambda choice: (choice.operation, choice.key, choice.tokens.first))
    for choice in ordered:
        if runs and _outcome(runs[-1][-1]) == _outcome(choice):
            runs[-1].append(choice)
        else:
            runs.append([choice])
    return runs


def _outcome(choice: Choice) -> tuple[Any, ...]:
    # Reasons have numbers in them.
    rejections = tuple((verdict.backend, verdict.rejected) for verdict in choice.rejections)
    return choice.operation, choice.key, choice.backend, choice.captured, rejections


def _span(numbers: Sequence[str]) -> str:
    return "" if not numbers else numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _choice(found: Mapping[str, Any]) -> Choice:
    return Choice(
        found["operation"],
        found["key"],
        TokenRange(**found["tokens"]),
        found["backend"],
        found["captured"],
        tuple(Verdict(**verdict) for verdict in found["verdicts"]),
    )
