"""What a command cannot do: a line that says what is wrong and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from moebius_worker.checkpoint.errors import CheckpointError


class CliError(Exception):
    """Shown to the user as it is, without a traceback; the command then exits with status 1."""


@contextmanager
def shown() -> Iterator[None]:
    """Turns a CliError or CheckpointError into its line and status 1, and Ctrl-C into status 130."""
    try:
        yield
    except (CliError, CheckpointError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
