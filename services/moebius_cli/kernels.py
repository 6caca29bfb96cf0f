"""`moebius kernels`: what is compiled for GPUs, and how its work is cut up."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from moebius_cli.console import step
from moebius_cli.errors import CliError, shown
from moebius_cli.options import (
    DtypeOption,
    KvCacheDtypeOption,
    LoadFormatOption,
    PageSizeOption,
    dummy_form,
)
from moebius_cli.tune import tune

kernels = typer.Typer(
    help="Compile kernels ahead, so that workers start sooner, and fit them to a model's shapes.",
    no_args_is_help=True,
)


@kernels.command()
def build(
    arch: Annotated[
        list[str], typer.Option(help="A compute capability, such as 9.0; may be given several times.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A checkpoint directory, a .gguf file, or a Hugging Face id (owner/name)."),
    ] = None,
    dtype: DtypeOption = "auto",
    load_format: LoadFormatOption = "auto",
    page_size: PageSizeOption = 16,
    kv_cache_dtype: KvCacheDtypeOption = "model",
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests that are computed at the same time, as of the worker.")
    ] = 32,
    max_step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the largest step, as of the worker.")
    ] = None,
) -> None:
    """Compile kernels into the cache (MOEBIUS_CACHE_DIR), where workers find them; needs no GPU.

    CUDA C++ kernels, if there are any, need nvcc. Triton's are compiled for the
    shapes of the model: a worker with the same settings and versions then
    compiles next to nothing. The first preflight still tries them all.

    A C compiler is needed here, for what launches the kernels, and still by the
    worker, for Triton's own driver and for what depends on the sizes of its
    caches.

    Example: moebius kernels build --arch 9.0 --model Qwen/Qwen3-30B-A3B --max-running 64
    """
    with shown():
        architectures = [_architecture(one) for one in arch]
        options = {
            "dtype": dtype,
            "dummy_weights": dummy_form(load_format),
            "page_size": page_size,
            "max_running": max_running,
            "max_step_tokens": max_step_tokens,
        }
        console = Console()
        any_sources = _build_sources(console, architectures)
        if model is None and not any_sources:
            raise CliError("No kernel is compiled without a model: name one with --model.")
        if model is not None:
            for architecture in architectures:
                _build_model(console, model, options, kv_cache_dtype, architecture)


kernels.command()(tune)


def _build_sources(console: Console, architectures: Sequence[tuple[int, int]]) -> bool:
    """Whether there are any."""
    from moebius_kernels.jit.cache import ArtefactCache, cache_root
    from moebius_kernels.jit.nvcc import CompileError, build, find_compiler
    from moebius_kernels.registry import cuda_sources

    cache = ArtefactCache(cache_root() / "cuda")
    sources = cuda_sources()
    if not sources:
        console.print("No kernel is in CUDA C++.")
        return False
    try:
        compiler = find_compiler()
        for source in sources:
            for architecture in architectures:
                with step(console, source.name) as doing:
                    doing.result = str(build(source, architecture, cache, compiler))
    except CompileError as error:
        raise CliError(str(error)) from error
    return True


def _build_model(
    console: Console,
    model: str,
    options: dict[str, Any],
    kv_cache_dtype: str,
    architecture: tuple[int, int],
) -> None:
    """`options`: of `RunnerOptions`."""
    # Late, since it takes seconds to load torch.
    from moebius_kernels.kv_pages import KvFormat
    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.engine.runner import RunnerOptions
    from moebius_worker.preflight.build import build_kernels
    from moebius_worker.preflight.run import PreflightError

    wanted = RunnerOptions(kv_format=KvFormat(kv_cache_dtype), **options)
    with step(console, "{}.{}".format(*architecture)) as doing:

        def progress(phase: str, done: int, total: int) -> None:
            doing.result = phase.removeprefix("preflight: ")
            doing.update(doing.result)

        try:
            build_kernels(open_checkpoint(model), wanted, architecture, progress)
        except PreflightError as error:
            raise CliError(str(error)) from error


def _architecture(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise CliError(f"--arch {text!r} is no compute capability: give one such as 9.0.")
    return int(major), int(minor)
