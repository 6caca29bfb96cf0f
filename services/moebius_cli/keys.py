"""`moebius keys`: API keys of a gateway. The file has their hashes only; a key is shown once."""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from moebius_cli.errors import CliError, shown
from moebius_gateway.admission.limits import Client, ClientLimits, Priority
from moebius_gateway.auth.keys import NAME, ApiKey, KeysError, hashed, new_key, parse_keys, written

FileOption = Annotated[
    Path,
    typer.Option("--file", help="That of the gateway's --api-keys.", envvar="MOEBIUS_GATEWAY_API_KEYS"),
]
NameArgument = Annotated[str, typer.Argument(help="Names the client in logs and metrics.")]

keys = typer.Typer(
    help="API keys of a gateway: add, list, remove. The gateway takes in changes without a restart.",
    no_args_is_help=True,
)


@keys.command()
def add(
    name: NameArgument,
    file: FileOption,
    priority: Annotated[
        Literal["high", "normal", "low"], typer.Option(help="How soon its requests have their turn.")
    ] = "normal",
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Sequences generated at the same time; more wait.")
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option(min=0.001, help="More are refused with 429.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(min=0.001, help="Of prompts and answers; more are refused with 429.")
    ] = None,
) -> None:
    """Make a key and print it: it cannot be shown again.

    Example: moebius keys add team-a --file keys.toml --max-concurrent 8
    """
    with shown():
        if not NAME.fullmatch(name):
            raise CliError(f"{name!r} is no name: letters, digits and ._@- only, at most 64")
        known = _read(file)
        if any(key.client.name == name for key in known):
            raise CliError(f"{file} has a key of {name!r} already: remove it first, or take another name")
        key = new_key()
        limits = ClientLimits(
            Priority[priority.upper()], max_concurrent, requests_per_minute, tokens_per_minute
        )
        _write(file, (*known, ApiKey(hashed(key), Client(name, limits))))
    typer.echo(key)


@keys.command("list")
def list_(file: FileOption) -> None:
    """Show names and limits."""
    with shown():
        known = _read(file)
    table = Table("name", "hash", "priority", "concurrent", "requests/min", "tokens/min")
    for key in known:
        limits = key.client.limits
        numbers = (limits.max_concurrent, limits.requests_per_minute, limits.tokens_per_minute)
        table.add_row(
            key.client.name,
            f"{key.hash[:15]}...",
            limits.priority.name.lower(),
            *("-" if number is None else f"{number:g}" for number in numbers),
        )
    Console().print(table)


@keys.command()
def remove(name: NameArgument, file: FileOption) -> None:
    """Make a key invalid."""
    with shown():
        known = _read(file)
        left = tuple(key for key in known if key.client.name != name)
        if len(left) == len(known):
            raise CliError(f"{file} has no key of {name!r}")
        _write(file, left)


def _read(file: Path) -> tuple[ApiKey, ...]:
    try:
        return parse_keys(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (KeysError, OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file} cannot be used: {error}") from error


def _write(file: Path, known: tuple[ApiKey, ...]) -> None:
    """At once or not at all: a gateway may be reading it. Readable for its owner only, if it is new."""
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}")
        with os.fdopen(handle, "w", encoding="utf-8") as output:
            output.write(written(known))
        if file.exists():
            Path(temporary).chmod(file.stat().st_mode & 0o777)
        Path(temporary).replace(file)
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror}") from error
