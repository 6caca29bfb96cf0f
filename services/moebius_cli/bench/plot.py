"""Results as a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from moebius_cli.bench.compare import MEASURES, Measure
from moebius_cli.bench.result import Level, Result
from moebius_cli.errors import CliError

AXES = {"concurrency": "streams at the same time", "rate": "requests a second"}
PANELS = ("tokens/s", "tokens/s a stream", "TTFT ms", "ITL ms")
LINES = {"": "-", "p50": "-", "p95": "--", "p99": ":"}


def check_plot() -> None:
    """Raises CliError if nothing can be plotted here: before the measurements, rather than after."""
    if find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib, which is not installed: pip install 'moebius[bench]'")


def plot(path: Path, results: Sequence[tuple[str, Result]]) -> None:
    """Writes a PNG: of each result, by its name, what each level gave. Raises CliError."""
    from matplotlib.figure import Figure

    kinds = [
        kind
        for kind in AXES
        if any(level.load.kind == kind for _, result in results for level in result.levels)
    ]
    figure = Figure(figsize=(4 * len(PANELS), 3.6 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), len(PANELS), squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        for axes, title in zip(row, PANELS, strict=True):
            for number, (name, result) in enumerate(results):
                levels = [level for level in result.levels if level.load.kind == kind]
                for measure in (one for one in MEASURES if one.group == title):
                    axes.plot(
                        *_points(levels, measure),
                        LINES[measure.part],
                        marker="o",
                        color=f"C{number}",
                        label=f"{name} {measure.part}",
                    )
            axes.set(title=title, xlabel=AXES[kind])
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error


def _points(levels: Sequence[Level], measure: Measure) -> tuple[list[float], list[float]]:
    pairs = [
        (level.load.value, value)
        for level in sorted(levels, key=lambda level: level.load.value)
        if (value := measure.of(level)) is not None
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]
