"""`moebius bench`: the commands."""

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from moebius_cli.bench import compare, report
from moebius_cli.bench.connections import Connections
from moebius_cli.bench.endpoint import Endpoint, examine
from moebius_cli.bench.plot import check_plot, plot
from moebius_cli.bench.progress import shown_progress
from moebius_cli.bench.result import Level, Load, Result, Settings, read_result, write_result
from moebius_cli.bench.sweep import Sweep
from moebius_cli.errors import CliError, shown
from moebius_cli.options import StateDirOption
from moebius_cli.state_dir import StateDir

DEFAULT_CONCURRENCY = "1,2,4,8,16,32"
DEFAULT_SECONDS = 30.0

bench = typer.Typer(help="Measure an endpoint under load.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Without this, typer makes a group of one command that command."""


@bench.command()
def serve(
    state_dir: StateDirOption,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Levels of a closed loop: so many streams at any time.", show_default=DEFAULT_CONCURRENCY
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Levels of an open loop: so many requests a second, as a Poisson process."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Of any endpoint with OpenAI's API. Left out: of the stack that runs here."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Left out: the first of /v1/models.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Sent to that URL.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, chat template included.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 256,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Of the input tokens, how many are the same in all prompts.")
    ] = 0,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds in which a level begins requests.",
            show_default=f"{DEFAULT_SECONDS:g}, without --requests",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a level, instead; at least one a stream.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a request is given up.")] = 600,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.", dir_okay=False)] = None,
    plot_to: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw a PNG; needs matplotlib, of the extra bench.", dir_okay=False),
    ] = None,
    compared: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A.json B.json", help="Measure nothing: show two results."),
    ] = None,
) -> None:
    """Measure latency and throughput, level after level.

    Each level is warmed first. Prompts are random words, without a common beginning unless
    --shared-prefix asks for one. pN: N percent of the values are at least so good.

    Examples: moebius bench serve --concurrency 1,8,32 --out new.json --plot new.png

    moebius bench serve --url https://api.example.com/v1 --rate 0.5,1,2 --requests 100

    moebius bench serve --compare old.json new.json
    """
    with shown():
        if plot_to is not None:
            check_plot()
        for file in (out, plot_to):
            if file is not None and not file.parent.is_dir():
                raise CliError(f"{file.parent} is no directory: {file.name} cannot be written there.")
        if compared is not None:
            _compare(*compared, plot_to)
            return
        if duration is not None and requests is not None:
            raise CliError("Give --duration or --requests, not both: a level ends in one way.")
        if duration is None and requests is None:
            duration = DEFAULT_SECONDS
        if shared_prefix >= input_tokens:
            raise CliError(f"--shared-prefix {shared_prefix} leaves nothing of {input_tokens} input tokens.")
        if concurrency is None and rate is None:
            concurrency = DEFAULT_CONCURRENCY
        loads = [*_concurrencies(concurrency), *_rates(rate)]
        settings = Settings(input_tokens, output_tokens, shared_prefix, requests, duration)
        base = _base_url(url or _running_url(StateDir(state_dir)))
        levels: list[Level] = []
        endpoints: list[Endpoint] = []
        try:
            asyncio.run(_measure(base, api_key, model, settings, timeout, loads, endpoints, levels))
        finally:
            # Also after Ctrl-C: what is measured is measured.
            if levels:
                _tell(_result(base, endpoints[0], settings, levels), out, plot_to)
        if not any(level.completed for level in levels):
            raise CliError("No request was answered.")


async def _measure(
    url: httpx.URL,
    api_key: str | None,
    model: str | None,
    settings: Settings,
    limit: float,
    loads: list[Load],
    endpoints: list[Endpoint],
    levels: list[Level],
) -> None:
    """Appends what is found, so that it is there if this is interrupted."""
    console = Console(stderr=True, highlight=False)
    async with Connections(url, api_key) as connections:
        endpoint = await examine(connections, model, limit)
        endpoints.append(endpoint)
        console.print(f"Measuring {escape(endpoint.model)} at {escape(str(url))}", soft_wrap=True)
        with shown_progress(console, settings, len(loads)) as watch:
            sweep = Sweep(connections, endpoint, settings, limit, watch)
            async with aclosing(sweep.levels(loads)) as measured:
                async for level in measured:
                    levels.append(level)


def _result(url: httpx.URL, endpoint: Endpoint, settings: Settings, levels: list[Level]) -> Result:
    return Result(
        version=1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        url=str(url.copy_with(userinfo=b"")),
        model=endpoint.model,
        settings=settings,
        length_control=endpoint.dialect.length_control,
        input_fitted=endpoint.lengths is not None,
        levels=tuple(levels),
    )


def _tell(result: Result, out: Path | None, plot_to: Path | None) -> None:
    console = Console(highlight=False)
    console.print(report.table(result))
    for note in report.notes(result):
        console.print(escape(note), soft_wrap=True)
    if out is not None:
        write_result(out, result)
    if plot_to is not None:
        plot(plot_to, [(result.model, result)])


def _compare(a: Path, b: Path, plot_to: Path | None) -> None:
    left, right = read_result(a), read_result(b)
    rows = compare.compare(left, right)
    console = Console(highlight=False)
    console.print(f"A {escape(str(a))}, {left.created}\nB {escape(str(b))}, {right.created}", soft_wrap=True)
    for note in compare.unlike(left, right):
        console.print(f"[yellow]{escape(note)}[/yellow]", soft_wrap=True)
    if not rows:
        raise CliError("The two results have no level in common.")
    console.print(compare.table(rows))
    if plot_to is not None:
        plot(plot_to, [(a.stem, left), (b.stem, right)])


def _base_url(url: str) -> httpx.URL:
    """With the path under which the API lies: /v1, if `url` does not end in it."""
    path = url.rstrip("/")
    try:
        parsed = httpx.URL(path if path.endswith("/v1") else path + "/v1")
    except httpx.InvalidURL as error:
        raise CliError(f"--url {url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise CliError(f"--url {url!r} is no address: give one such as http://127.0.0.1:8000")
    return parsed


def _running_url(state_dir: StateDir) -> str:
    record = state_dir.running()
    if record is None:
        raise CliError(
            f"No stack runs here (state directory {state_dir.path}). Start one (moebius up), or name an "
            "endpoint: --url"
        )
    return record.url


def _concurrencies(text: str | None) -> list[Load]:
    loads = [Load("concurrency", value) for value in _numbers("--concurrency", text)]
    if any(not load.value.is_integer() for load in loads):
        raise CliError(f"--concurrency {text!r}: streams come whole.")
    return loads


def _rates(text: str | None) -> list[Load]:
    return [Load("rate", value) for value in _numbers("--rate", text)]


def _numbers(option: str, text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise CliError(f"{option} {text!r}: give numbers above 0, separated by commas.")
    if len(set(numbers)) < len(numbers):
        raise CliError(f"{option} {text!r}: give each level once.")
    return numbers
