"""What a sweep shows while it runs: a bar on a terminal; in a log, a line a level."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moebius_cli.bench.result import Load, Settings
from moebius_cli.bench.stream import Tally
from moebius_cli.bench.sweep import Watch, extent


@contextmanager
def shown_progress(console: Console, settings: Settings, levels: int) -> Iterator[Watch]:
    """Yields what the sweep calls now and again."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[doing]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    task = bar.add_task("", total=1.0, doing="")
    seen: list[Load] = []

    def watch(load: Load, seconds: float | None, tally: Tally) -> None:
        title = f"{load.kind} {load} ({len(seen) + (load not in seen)} of {levels})"
        if load not in seen:
            seen.append(load)
            bar.reset(task)
            if not console.is_terminal:
                console.print(title)
        done, doing = progress(settings, load, seconds, tally)
        bar.update(task, description=title, completed=done, doing=doing)

    with bar:
        yield watch


def progress(settings: Settings, load: Load, seconds: float | None, tally: Tally) -> tuple[float, str]:
    """Which part of a level is done, and a word about it."""
    if seconds is None:
        return 0.0, "warming"
    length = extent(load, settings)
    finished = tally.completed + tally.failed
    part = finished / length.requests if length.requests is not None else seconds / (length.duration or 1.0)
    failed = f", {tally.failed} failed" if tally.failed else ""
    if part >= 1.0 and tally.in_flight:
        return 1.0, f"waiting for the last {tally.in_flight}{failed}"
    rate = tally.chunks / seconds if seconds > 0 else 0.0
    return min(part, 1.0), f"{rate:.0f} tokens/s, {finished} done{failed}"
