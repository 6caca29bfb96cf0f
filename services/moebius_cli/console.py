"""What `moebius up` prints: steps with their times, on a terminal with a moving line, in a log without."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

# Where nothing moves, a step that takes long says so again after so many seconds.
QUIET_SECONDS = 10.0


class Step:
    """A step that is being done."""

    def __init__(self, console: Console, title: str, status: Status | None) -> None:
        self._console = console
        self._title = title
        self._status = status
        self._said = time.monotonic()
        # What there is to say when it is done.
        self.result = ""

    def update(self, doing: str) -> None:
        """Shows what is being done now."""
        if self._status is not None:
            self._status.update(f"{escape(self._title)} [dim]{escape(doing)}[/dim]")
        elif time.monotonic() - self._said >= QUIET_SECONDS:
            self._said = time.monotonic()
            self._console.print(
                f"  ... {escape(self._title)} {escape(doing)}", highlight=False, soft_wrap=True
            )


@contextmanager
def step(console: Console, title: str) -> Iterator[Step]:
    """Shows that `title` is being done and, if it succeeds, how long it took."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(escape(title)) as status:
            current = Step(console, title, status)
            yield current
    else:
        current = Step(console, title, None)
        yield current
    seconds = time.monotonic() - started
    console.print(
        f"[green]✓[/green] {escape(title):<12} {escape(current.result)} [dim]{seconds:.1f} s[/dim]",
        highlight=False,
        soft_wrap=True,
    )
