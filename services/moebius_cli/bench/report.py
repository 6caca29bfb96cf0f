"""A result for people: a table, and what to know about it."""

from collections.abc import Iterator

from rich.table import Table

from moebius_cli.bench.result import Level, Result, Spread

# Above this share of a core the load generator may be what is slow.
BUSY = 0.7


def table(result: Result) -> Table:
    # Fits into 80 columns, as where the output is no terminal.
    shown = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("streams", "tokens/s", "a stream", "TTFT ms", "ITL ms", "requests", "failed"):
        shown.add_column(name, justify="right", overflow="fold")
    shown.add_row("", "in all", *["[dim]p50/p95/p99[/dim]"] * 3, "", "")
    for level in result.levels:
        shown.add_row(*_row(level))
    return shown


def _row(level: Level) -> tuple[str, ...]:
    return (
        str(level.load),
        number(level.output_rate),
        percentiles(level.stream_rate),
        percentiles(level.ttft, 1000),
        percentiles(level.itl, 1000),
        str(level.completed),
        f"[red]{level.failed}[/red]" if level.failed else "0",
    )


def percentiles(spread: Spread | None, scale: float = 1.0) -> str:
    if spread is None:
        return "-"
    return "/".join(number(value * scale) for value in (spread.p50, spread.p95, spread.p99))


def number(value: float) -> str:
    """With three digits, or all those before the point."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def notes(result: Result) -> Iterator[str]:
    """What the figures rest on, and what is wrong with them."""
    yield _lengths(result)
    sources = {level.token_source for level in result.levels} - {None}
    if sources <= {"usage"}:
        yield "Tokens are counted by the endpoint (usage)."
    else:
        yield "Where the endpoint tells no usage, pieces with text are counted: there may be more tokens."
    for level in result.levels:
        if level.load.kind == "rate":
            yield f"At {level.load}, at most {level.peak_in_flight} requests were open at the same time."
        if level.short_outputs:
            yield (
                f"At {level.load}, {level.short_outputs} of {level.completed} answers ended before "
                f"{result.settings.output_tokens} tokens."
            )
        for error in level.errors:
            yield f"At {level.load}, {error.count} failed: {error.kind}: {error.example}"
        if level.client_cpu > BUSY:
            yield (
                f"At {level.load} this load generator took {level.client_cpu:.0%} of a core: "
                "the endpoint may be faster than that."
            )


def _lengths(result: Result) -> str:
    inputs = [level.input_tokens for level in result.levels if level.input_tokens is not None]
    asked = result.settings.input_tokens
    if not inputs:
        told = f"about {asked} (the endpoint does not tell)"
    elif result.input_fitted:
        told = f"{sum(inputs) / len(inputs):.0f}"
    else:
        told = f"{sum(inputs) / len(inputs):.0f} ({asked} asked for)"
    how = {
        "ignore_eos": "ignore_eos",
        "min_tokens": "min_tokens; the endpoint does not take ignore_eos",
        "none": "only limited; the endpoint takes neither ignore_eos nor min_tokens",
    }
    outputs = result.settings.output_tokens
    return f"Input tokens {told}, output tokens {outputs} ({how[result.length_control]})."
