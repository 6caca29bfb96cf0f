"""Draws a dashboard's JSON, panel by panel, at the places that Grafana would give them."""

import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.dates
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deploy.render.prometheus import Series, Source, Span
from deploy.render.words import filled_in, legend, number

COLUMNS = 24
# Of a unit of the grid.
WIDTH_INCHES, HEIGHT_INCHES = 0.75, 0.42
COLOURS = {
    "green": "#3f9142",
    "yellow": "#d9a400",
    "orange": "#e0752d",
    "red": "#d44a3a",
    "blue": "#3274d9",
    "purple": "#8f5bb5",
}
# As many as a picture's legend has room for.
MOST_LEGENDS = 8

# What a panel's queries brought, with the legend of each series.
Data = Sequence[tuple[str, Series]]


def draw(board: Mapping[str, Any], prometheus: Source, span: Span, scrape_interval: float) -> Figure:
    """Raises PrometheusError."""
    panels = board["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + 2
    figure = plt.figure(figsize=(COLUMNS * WIDTH_INCHES, rows * HEIGHT_INCHES), dpi=80)
    figure.text(0.01, 1 - 0.9 / rows, board["title"], fontsize=15, weight="bold", va="center")
    figure.text(0.25, 1 - 0.9 / rows, board["description"], fontsize=9, color="#666666", va="center")
    for panel in panels:
        place = panel["gridPos"]
        top = 1 - (place["y"] + 2) / rows
        if panel["type"] == "row":
            figure.text(0.01, top - 0.5 / rows, panel["title"], fontsize=12, color="#444444", va="center")
            continue
        # Room for the title above and for axes below and to the left.
        left, width = (place["x"] + 1.3) / COLUMNS, (place["w"] - 1.7) / COLUMNS
        bottom, height = top - (place["h"] - 1.6) / rows, (place["h"] - 2.6) / rows
        axes = figure.add_axes((left, bottom, width, height))
        axes.set_title(panel["title"], fontsize=10, loc="left")
        # Bars are of a minute at least.
        own = replace(span, step=max(span.step, 60.0)) if panel.get("interval") == "1m" else span
        own = replace(own, start=own.end - (own.end - own.start) // own.step * own.step)
        data = _ask(panel, prometheus, own, max(4 * scrape_interval, own.step + scrape_interval))
        if not data:
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#999999")
            axes.set_axis_off()
        else:
            _PAINTERS[panel["type"]](axes, panel, data, own)
    return figure


def _ask(panel: Mapping[str, Any], prometheus: Source, span: Span, rate_interval: float) -> Data:
    found: list[tuple[str, Series]] = []
    for target in panel["targets"]:
        query = filled_in(target["expr"], rate_interval)
        got = prometheus.at(query, span.end) if target.get("instant") else prometheus.over(query, span)
        found += ((legend(target.get("legendFormat", ""), one.labels), one) for one in got)
    return found


def _stat(axes: Axes, panel: Mapping[str, Any], data: Data, span: Span) -> None:
    axes.set_axis_off()
    [(_, series)] = data
    defaults = panel["fieldConfig"]["defaults"]
    times, values = _columns(series)
    colour = _colour_of(values[-1], defaults["thresholds"]["steps"])
    text = number(values[-1], defaults["unit"], defaults.get("decimals"))
    axes.text(
        0.5,
        0.62,
        text,
        fontsize=22,
        weight="bold",
        color=colour,
        ha="center",
        va="center",
        transform=axes.transAxes,
    )
    beneath = axes.inset_axes((0, 0, 1, 0.3))
    beneath.fill_between(times, values, color=colour, alpha=0.25, linewidth=0)
    beneath.set_ylim(bottom=0)
    beneath.set_axis_off()


def _timeseries(axes: Axes, panel: Mapping[str, Any], data: Data, span: Span) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    names = [name for name, _ in data]
    fixed = {
        override["matcher"]["options"]: COLOURS[override["properties"][0]["value"]["fixedColor"]]
        for override in panel["fieldConfig"].get("overrides", ())
    }
    palette = itertools.cycle(f"C{number}" for number in range(10))
    colours = [fixed.get(name) or next(palette) for name in names]
    if stacked:
        times = _grid(span)
        levels = [_on_grid(series, span) for _, series in data]
        if custom.get("drawStyle") == "bars":
            below = [0.0] * len(times)
            for name, level, colour in zip(names, levels, colours, strict=True):
                width = 0.9 * span.step / 86400
                axes.bar(times, level, width=width, bottom=below, label=name, color=colour)
                below = [one + other for one, other in zip(below, level, strict=True)]
        else:
            axes.stackplot(times, *levels, labels=names, colors=colours, alpha=0.7)
    else:
        for (name, series), colour in zip(data, colours, strict=True):
            axes.plot(
                *broken(series, span), label=name, linewidth=1.4, color=colour, marker="o", markersize=1.5
            )
        top = max(value for _, series in data for _, value in series.points)
        for step in defaults["thresholds"]["steps"][1:]:
            # One that is far away would press the lines flat.
            if step["value"] <= 2 * top:
                axes.axhline(step["value"], color=COLOURS[step["color"]], linestyle="--", linewidth=1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, defaults["unit"])))
    _, reached = axes.get_ylim()
    axes.set_ylim(0, defaults.get("max", max(reached, custom.get("axisSoftMax", 0))))
    axes.grid(color="#e5e5e5", linewidth=0.6)
    _time_axis(axes, span)
    _legend(axes)


def _states(axes: Axes, panel: Mapping[str, Any], data: Data, span: Span) -> None:
    [mapping] = panel["fieldConfig"]["defaults"]["mappings"]
    words = {int(value): (result["text"], result["color"]) for value, result in mapping["options"].items()}
    shown: set[int] = set()
    rows = sorted(data, key=lambda pair: pair[0], reverse=True)
    for row, (_, series) in enumerate(rows):
        for time, value in series.points:
            text, colour = words[int(value)]
            label = None if int(value) in shown else text
            shown.add(int(value))
            axes.barh(
                row, span.step / 86400, left=_time(time), color=COLOURS[colour], label=label, height=0.7
            )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    _time_axis(axes, span)
    _legend(axes)


def _table(axes: Axes, panel: Mapping[str, Any], data: Data, span: Span) -> None:
    axes.set_axis_off()
    labels = sorted({label for _, series in data for label in series.labels})
    [organize] = panel["transformations"]
    numbered = not organize["options"]["excludeByName"]["Value"]
    lines = [
        [series.labels.get(label, "") for label in labels]
        + ([number(series.points[-1][1], "short")] if numbered else [])
        for _, series in data
    ]
    heads = [*labels, *(["Value"] if numbered else [])]
    wide = [max(len(str(line[place])) for line in [heads, *lines]) for place in range(len(heads))]
    text = [heads, *sorted(lines)]
    for place, line in enumerate(text[:12]):
        axes.text(
            0,
            0.95 - place / 12,
            "  ".join(word.ljust(size) for word, size in zip(line, wide, strict=True)),
            family="monospace",
            fontsize=8,
            weight="bold" if place == 0 else "normal",
            transform=axes.transAxes,
        )


_PAINTERS: dict[str, Callable[[Axes, Mapping[str, Any], Data, Span], None]] = {
    "stat": _stat,
    "timeseries": _timeseries,
    "state-timeline": _states,
    "table": _table,
}


def _legend(axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[:MOST_LEGENDS],
        names[:MOST_LEGENDS],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.11),
        ncols=4,
        fontsize=7,
        frameon=False,
    )


def _time_axis(axes: Axes, span: Span) -> None:
    axes.set_xlim(_time(span.start), _time(span.end))
    axes.xaxis.set_major_locator(matplotlib.dates.AutoDateLocator(maxticks=6))
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M"))
    axes.tick_params(labelsize=7)


def _time(unix: float) -> float:
    return float(matplotlib.dates.date2num(datetime.datetime.fromtimestamp(unix)))


def _columns(series: Series) -> tuple[list[float], list[float]]:
    return [_time(time) for time, _ in series.points], [value for _, value in series.points]


def broken(series: Series, span: Span) -> tuple[list[float], list[float]]:
    """Columns, without a line across what is missing."""
    times, values = [], []
    before = series.points[0][0]
    for time, value in series.points:
        if time - before > 1.5 * span.step:
            times.append(_time(time))
            values.append(math.nan)
        times.append(_time(time))
        values.append(value)
        before = time
    return times, values


def _grid(span: Span) -> list[float]:
    return [_time(span.start + place * span.step) for place in range(_places(span))]


def _on_grid(series: Series, span: Span) -> list[float]:
    level = [0.0] * _places(span)
    for time, value in series.points:
        level[round((time - span.start) / span.step)] = value
    return level


def _places(span: Span) -> int:
    return round((span.end - span.start) / span.step) + 1


def _colour_of(value: float, steps: Sequence[Mapping[str, Any]]) -> str:
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLOURS[reached[-1]]
