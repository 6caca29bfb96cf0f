"""`moebius inspect`: what a checkpoint is, and whether it can be served here."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moebius_cli.errors import CliError, shown
from moebius_cli.options import ModelArgument
from moebius_worker.host_memory import host_memory

if TYPE_CHECKING:
    from moebius_worker.engine.inspection import Inspection


def inspect(
    model: ModelArgument,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory that it has to fit into, such as 24GiB. Left out: this machine's."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="What it would compute in: float32, bfloat16, float16.")
    ] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a checkpoint is: family, formats, parameters, bytes, and whether it fits into memory.

    Only headers are read. A checkpoint that Moebius cannot serve is refused as the worker would refuse it.

    Example: moebius inspect Qwen3-30B-A3B-NVFP4 --memory 24GiB
    """
    with shown():
        available = host_memory().available if memory is None else _bytes(memory)
        inspection = _inspect(model, dtype)
        found = {**asdict(inspection), "available": available, "fits": _fits(inspection, available)}
        if as_json:
            typer.echo(json.dumps(found | {"parameters": inspection.parameters, "bytes": inspection.nbytes}))
            return
        _show(Console(), inspection, available)


def _inspect(model: str, dtype: str) -> "Inspection":
    # Late, since it takes seconds to load torch.
    import torch

    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.engine.inspection import inspect_checkpoint

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise CliError(f"The dtype {dtype!r} is not supported. Choose {', '.join(dtypes)}.")
    return inspect_checkpoint(open_checkpoint(model), dtypes[dtype])


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise CliError(f"--memory {text!r} is no size: give one such as 24GiB or 16000MB.") from error


def _fits(inspection: "Inspection", available: int) -> dict[str, int | None]:
    """Tokens of context that fit beside the weights, None if these do not, by how the weights are kept."""
    return {how: _tokens(inspection, available - nbytes) for how, nbytes in inspection.memory.items()}


def _tokens(inspection: "Inspection", rest: int) -> int | None:
    rest -= inspection.state_bytes + (inspection.window or 0) * inspection.window_token_bytes
    if rest <= 0:
        return None
    return inspection.context if not inspection.token_bytes else rest // inspection.token_bytes


def _show(console: Console, inspection: "Inspection", available: int) -> None:
    def line(label: str, text: str) -> None:
        console.print(f"[bold]{label:<14}[/bold] {escape(text)}", highlight=False, soft_wrap=True)

    line("model", inspection.name)
    kinds = dict.fromkeys((inspection.container, inspection.quantisation))
    line("family", f"{inspection.architecture} ({', '.join(kinds)})")
    line(
        "parameters", f"{_count(inspection.parameters)}, of which {_count(inspection.active)} compute a token"
    )
    line("stored", _size(inspection.nbytes))
    table = Table("layers", "form", "parameters", "bytes", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in inspection.kinds:
        forms = ", ".join(
            form if len(row.forms) == 1 else f"{form} {count / row.parameters:.0%}"
            for form, count in row.forms.items()
        )
        table.add_row(row.kind, forms, _count(row.parameters), _size(row.nbytes))
    console.print(table)
    if inspection.left_out:
        names = ", ".join(f"{count} tensors {start}.*" for start, count in inspection.left_out.items())
        line("left out", f"{names} (not needed to serve text)")
    line("context", f"{inspection.context:,} tokens")
    line("a token keeps", f"{_size(inspection.token_bytes)} in the KV cache")
    if inspection.window:
        line(
            "window",
            f"{_size(inspection.window_token_bytes)} more for each of the last {inspection.window:,} tokens",
        )
    if inspection.state_bytes:
        line("state", f"{_size(inspection.state_bytes)} for each text")
    for how, tokens in _fits(inspection, available).items():
        weights = f"weights {how}: {_size(inspection.memory[how])}"
        if tokens is None:
            line("does not fit", f"{weights}, more than the {_size(available)} that there are")
        else:
            line("fits", f"{weights}; of {_size(available)} the rest holds {tokens:,} tokens of context")


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"
