"""`moebius preflight`: which kernels a model would be served with on this machine, and why not others."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moebius_cli.console import step
from moebius_cli.errors import CliError, shown
from moebius_cli.options import (
    DtypeOption,
    KvCacheDtypeOption,
    LoadFormatOption,
    ModelArgument,
    PageSizeOption,
    dummy_form,
)

if TYPE_CHECKING:
    from moebius_kernels.plan import Plan


def preflight(
    model: ModelArgument,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1. auto: cuda if present.")] = "auto",
    dtype: DtypeOption = "auto",
    load_format: LoadFormatOption = "auto",
    page_size: PageSizeOption = 16,
    kv_cache_dtype: KvCacheDtypeOption = "model",
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests that are computed at the same time.")
    ] = 32,
    max_step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the largest step. Left out: by the device.")
    ] = None,
    exclude_backends: Annotated[
        str, typer.Option(help="Backends that are not to be used: operation:name, separated by commas.")
    ] = "",
    fresh: Annotated[bool, typer.Option(help="Make the plan anew, even if there is one.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Try every kernel that a model could use here: with its weights, in a process that may die of it.

    Prints the plan: which backend computes which operation at which token counts, and why others do not. A
    worker with the same settings starts with the same plan, without making it again.

    Example: moebius preflight Qwen3-30B-A3B-NVFP4 --max-running 64
    """
    with shown():
        console = Console(stderr=as_json)
        with step(console, "preflight") as doing:
            plan, missing = _examine(
                model,
                {
                    "device": device,
                    "dtype": dtype,
                    "dummy_weights": dummy_form(load_format),
                    "page_size": page_size,
                    "max_running": max_running,
                    "max_step_tokens": max_step_tokens,
                },
                kv_cache_dtype,
                tuple(filter(None, exclude_backends.split(","))),
                fresh,
                lambda phase, done, total: doing.update(f"{phase} ({done} of {total} steps)"),
            )
            doing.result = f"{len(plan.choices)} choices on {plan.identity['device']}"
        if as_json:
            typer.echo(plan.to_json())
            return
        _show(console, plan)
        for module, reason in missing.items():
            console.print(f"[yellow]not here[/yellow] {escape(module)}: {escape(reason)}", highlight=False)


def _examine(
    model: str,
    options: dict[str, Any],
    kv_cache_dtype: str,
    excluded: tuple[str, ...],
    fresh: bool,
    progress: Callable[[str, int, int], None],
) -> tuple["Plan", Mapping[str, str]]:
    """The plan, and the modules that could not be imported, with reasons. `options`: of `RunnerOptions`."""
    # Late, since it takes seconds to load torch.
    from moebius_kernels.kv_pages import KvFormat
    from moebius_kernels.registry import gather
    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.engine.runner import RunnerOptions
    from moebius_worker.preflight.examine import Wanted, find_plan
    from moebius_worker.preflight.run import PreflightError

    wanted = Wanted(RunnerOptions(kv_format=KvFormat(kv_cache_dtype), **options), excluded)
    registry = gather()
    for name, reason in registry.mistaken(excluded).items():
        absent = ", ".join(f"{module}: {why}" for module, why in registry.missing.items())
        raise CliError(f"--exclude-backends {name}: {reason}" + (f" (not here: {absent})" if absent else ""))
    try:
        plan = find_plan(open_checkpoint(model), wanted, registry, progress, fresh=fresh)
    except PreflightError as error:
        raise CliError(str(error)) from error
    return plan, registry.missing


def _show(console: Console, plan: "Plan") -> None:
    from moebius_kernels.plan import rows_of

    if not plan.choices:
        console.print("Only the references can run here, in plain PyTorch. They compute everything.")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("operation", "of", "tokens", "backend", "µs", "error", "rejected"):
        table.add_column(name, justify="right" if name in ("µs", "error") else "left", overflow="fold")
    for row in rows_of(plan):
        table.add_row(*map(escape, row))
    console.print(table)
