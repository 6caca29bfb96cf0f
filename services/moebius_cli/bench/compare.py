"""Two results side by side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from rich.table import Table

from moebius_cli.bench.report import number
from moebius_cli.bench.result import Level, Load, Result, Spread

# Differences below this are not coloured.
NOISE = 0.02


@dataclass(frozen=True)
class Measure:
    group: str
    # Which percentile; empty where there is but one value.
    part: str
    of: Callable[[Level], float | None]
    higher_is_better: bool = False

    def __str__(self) -> str:
        return f"{self.group} {self.part}".strip()


def _percentiles(
    group: str, of: Callable[[Level], Spread | None], scale: float = 1.0, *, higher_is_better: bool = False
) -> list[Measure]:
    def part(name: str) -> Callable[[Level], float | None]:
        def value(level: Level) -> float | None:
            spread = of(level)
            return None if spread is None else getattr(spread, name) * scale

        return value

    return [Measure(group, name, part(name), higher_is_better) for name in ("p50", "p95", "p99")]


MEASURES = (
    Measure("tokens/s", "", lambda level: level.output_rate, higher_is_better=True),
    *_percentiles("tokens/s a stream", lambda level: level.stream_rate, higher_is_better=True),
    *_percentiles("TTFT ms", lambda level: level.ttft, 1000),
    *_percentiles("ITL ms", lambda level: level.itl, 1000),
    Measure("failed", "", lambda level: float(level.failed)),
)


@dataclass(frozen=True)
class Row:
    load: Load
    measure: Measure
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        """Of b, relative to a; None where there is none."""
        return None if self.a is None or self.b is None or self.a == 0 else self.b / self.a - 1


def compare(a: Result, b: Result) -> list[Row]:
    """The levels that both have, in the order of `a`."""
    others = {level.load: level for level in b.levels}
    return [
        Row(level.load, measure, measure.of(level), measure.of(others[level.load]))
        for level in a.levels
        if level.load in others
        for measure in MEASURES
    ]


def unlike(a: Result, b: Result) -> Iterator[str]:
    """What makes the two less than comparable."""
    pairs = [("model", a.model, b.model), ("length control", a.length_control, b.length_control)]
    pairs += [
        (field.name.replace("_", " "), getattr(a.settings, field.name), getattr(b.settings, field.name))
        for field in fields(a.settings)
    ]
    for name, left, right in pairs:
        if left != right:
            yield f"{name}: {left} in A, {right} in B"
    for name, one, other in (("A", a, b), ("B", b, a)):
        known = {level.load for level in other.levels}
        if only := [str(level.load) for level in one.levels if level.load not in known]:
            yield f"only {name} has the levels {', '.join(only)}"


def table(rows: list[Row]) -> Table:
    shown = Table("streams", "", box=None, pad_edge=False)
    for name in ("A", "B", "difference"):
        shown.add_column(name, justify="right", no_wrap=True)
    before: Load | None = None
    for row in rows:
        if row.load != before and before is not None:
            shown.add_row()
        shown.add_row(
            str(row.load) if row.load != before else "",
            str(row.measure),
            *("-" if value is None else number(value) for value in (row.a, row.b)),
            _coloured(row),
        )
        before = row.load
    return shown


def _coloured(row: Row) -> str:
    if row.difference is None:
        return "-"
    text = f"{row.difference:+.1%}"
    if abs(row.difference) < NOISE:
        return text
    colour = "green" if (row.difference > 0) == row.measure.higher_is_better else "red"
    return f"[{colour}]{text}[/{colour}]"
