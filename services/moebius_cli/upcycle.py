"""`moebius upcycle`: makes a Mixture of Experts of a dense checkpoint."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from moebius_cli.errors import shown


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def upcycle(
    source: Annotated[
        str,
        typer.Argument(
            help="The dense Llama model: a directory, a .gguf file, or a Hugging Face id (owner/name)."
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(help="The directory to write. It must be new or empty.", file_okay=False)
    ],
    experts: Annotated[int, typer.Option(min=1, help="Experts in each layer.")] = 4,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that serve each token.")] = 2,
    noise: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Makes the experts differ: the noise's standard deviation, relative to the weights'. "
            "With 0 the text is the dense model's; with 0.05 it is as sensible; from 0.2 on it suffers.",
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of the router and the noise: equal seeds give equal models.")
    ] = 0,
    dtype: Annotated[Dtype, typer.Option(help="In which the weights are written.")] = Dtype.BFLOAT16,
) -> None:
    """Turn a dense Llama model into a Mixture of Experts, without training.

    Every expert becomes a copy of the dense model's FFN and the router is random. The result is a checkpoint
    in the Mixtral architecture with tokenizer and chat template: a real MoE to try the server with, whose
    text is known.

    Example: moebius upcycle SmolLM2-135M-Instruct.Q4_1.gguf smol-moe --experts 8 --noise 0.05

    Then: moebius up --model smol-moe
    """
    # Late, since it takes a second to load torch.
    from moebius_worker.upcycle import UpcycleOptions
    from moebius_worker.upcycle import upcycle as run

    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    started = time.monotonic()
    with shown():
        options = UpcycleOptions(experts, top_k, noise, seed, dtype.value)
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("opening", total=None)
            run(
                source,
                destination,
                options,
                progress=lambda what, done, total: bar.update(
                    task, description=escape(what), completed=done, total=total
                ),
            )
    console.print(
        f"Wrote {escape(str(destination))}: {experts} experts, {top_k} for each token, "
        f"in {time.monotonic() - started:.1f} s. Serve it: moebius up --model {escape(str(destination))}",
        soft_wrap=True,
        highlight=False,
    )
