"""What a dashboard is made of, as plain data: Grafana's JSON and the pictures come from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# As Grafana calls them.
Unit = Literal["short", "s", "percentunit", "reqps", "bytes", "tok/s"]
Kind = Literal["stat", "lines", "stack", "bars", "table", "states"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `queries`: PromQL by legend; `{{label}}` in a legend stands for the label's value."""

    title: str
    # What it shows, what is good, and where to look if it is not.
    about: str
    queries: Mapping[str, str]
    kind: Kind = "lines"
    unit: Unit = "short"
    # From this value on, in this colour; below the first it is green.
    thresholds: Mapping[float, str] = field(default_factory=dict)
    # The colour below the first threshold.
    base: str = "green"
    # What numbers stand for, and their colours; for `states`.
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    # Of legends that mean something good or bad; others get those of a palette.
    colours: Mapping[str, str] = field(default_factory=dict)
    # Of 24 columns.
    width: int = 8
    height: int = 8
    # Of the axis; None: as the values are.
    max: float | None = None
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
