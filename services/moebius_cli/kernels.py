"""`moebius kernels`: what is compiled for GPUs, and how its work is cut up."""

from typing import Annotated

import typer
from rich.console import Console

from moebius_cli.console import step
from moebius_cli.errors import CliError, shown
from moebius_cli.tune import tune

kernels = typer.Typer(
    help="Compile kernels ahead, for images without a compiler, and fit them to a model's shapes.",
    no_args_is_help=True,
)


@kernels.command()
def build(
    arch: Annotated[
        list[str], typer.Option(help="A compute capability, such as 9.0; may be given several times.")
    ],
) -> None:
    """Compile the CUDA C++ kernels into the cache (MOEBIUS_CACHE_DIR), where workers find them.

    Needs nvcc and no GPU. Triton's kernels are compiled by the preflight, for the shapes of the model.

    Example: moebius kernels build --arch 9.0 --arch 12.0
    """
    from moebius_kernels.jit.cache import ArtefactCache, cache_root
    from moebius_kernels.jit.nvcc import CompileError, build, find_compiler
    from moebius_kernels.registry import cuda_sources

    with shown():
        architectures = [_architecture(one) for one in arch]
        console = Console()
        cache = ArtefactCache(cache_root() / "cuda")
        sources = cuda_sources()
        if not sources:
            console.print("All kernels are Triton's; there is nothing to compile ahead.")
            return
        try:
            compiler = find_compiler()
            for source in sources:
                for architecture in architectures:
                    with step(console, source.name) as doing:
                        doing.result = str(build(source, architecture, cache, compiler))
        except CompileError as error:
            raise CliError(str(error)) from error


kernels.command()(tune)


def _architecture(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise CliError(f"--arch {text!r} is no compute capability: give one such as 9.0.")
    return int(major), int(minor)
