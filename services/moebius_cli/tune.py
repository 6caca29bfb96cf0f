"""`moebius kernels tune`: the tilings of a model's products, measured on this machine's GPU."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moebius_cli.console import Step, step
from moebius_cli.errors import CliError, shown
from moebius_cli.options import LoadFormatOption, ModelArgument, dummy_form

if TYPE_CHECKING:
    from moebius_kernels.tuning import Compiling, Dropped, Point, Product, Trying, Tuned

TOKENS = "1,2,8,32,64,128,512,4096,8192"


def tune(
    model: ModelArgument,
    tokens: Annotated[
        str, typer.Option(help="Token counts of a step to measure at, separated by commas.")
    ] = TOKENS,
    load_format: LoadFormatOption = "auto",
    experts_only: Annotated[
        bool, typer.Option("--experts-only", help="Leave out dense layers: attention, shared experts, head.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be measured; needs no GPU.")
    ] = False,
) -> None:
    """Measure which tilings of the kernels are fastest for a model's shapes on this machine's GPU.

    Kernels cut their work into tiles. For shapes that were not measured, rules
    choose them; measuring finds better ones in some minutes. Weights are
    random, so that only the checkpoint's headers are read.

    The result is a table below MOEBIUS_CACHE_DIR for this kind of GPU. Workers
    use it from their next start on, after a new preflight; shapes of other
    models stay in it. CUDA_VISIBLE_DEVICES chooses the GPU, on which nothing
    else should run.

    Example: moebius kernels tune Qwen3-30B-A3B-NVFP4 --tokens 1,8,64
    """
    with shown():
        counts = _counts(tokens)
        console = Console()
        points = _points(model, load_format, counts, experts_only)
        if dry_run:
            _list(console, points)
            return
        path = _tune(console, points)
        console.print(f"Kept in {escape(str(path))}", highlight=False, soft_wrap=True)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CliError(f"--tokens {text!r}: give whole numbers above 0, separated by commas.")
    return sorted(set(map(int, parts)))


def _points(model: str, load_format: str, counts: Sequence[int], experts_only: bool) -> "list[Point]":
    # Late, since it takes seconds to load torch.
    from moebius_kernels.tuning import ExpertProduct, find_tuner
    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.preflight.products import products_of

    products: list[Product] = products_of(open_checkpoint(model), dummy_form(load_format))
    if experts_only:
        products = [one for one in products if isinstance(one, ExpertProduct)]
    return find_tuner().points(products, counts)


def _list(console: Console, points: "Iterable[Point]") -> None:
    table = Table("product", "tokens", "candidates", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    total = 0
    for (title, reason), some in groupby(points, key=lambda point: (point.title, point.reason)):
        alike = list(some)
        candidates = sum(point.candidates for point in alike)
        total += candidates
        counts = ", ".join(str(point.tokens) for point in alike)
        table.add_row(escape(title), counts, escape(reason) or str(candidates))
    console.print(table)
    console.print(f"{total} candidates in all", highlight=False)


def _tune(console: Console, points: "Sequence[Point]") -> object:
    from moebius_worker.preflight.tune import CannotTuneError, tune_here

    with step(console, "tune") as doing:
        progress = _Progress(console, doing)
        try:
            path = tune_here(points, progress.report)
        except CannotTuneError as error:
            raise CliError(
                f"{error}. Tilings are measured: run this where the model will be served, or with --dry-run."
            ) from error
        except OSError as error:
            raise CliError(f"The tilings cannot be kept: {error}") from error
        doing.result = f"{progress.tuned} tilings measured, {progress.faster} of them better than before"
    return path


class _Progress:
    """Shows what is going on, and a line for each tiling that was found or dropped."""

    def __init__(self, console: Console, doing: Step) -> None:
        self._console, self._doing = console, doing
        self.tuned = self.faster = 0

    def report(self, event: "Compiling | Trying | Dropped | Tuned") -> None:
        from moebius_kernels.tuning import Compiling, Dropped, Trying

        match event:
            case Compiling(done, total):
                self._doing.update(f"compiling ({done} of {total})")
            case Trying(point, number, best):
                so_far = "" if best is None else f", best {best:.1f} µs"
                self._doing.update(
                    f"{point.title}, tokens {point.tokens}: candidate {number} of {point.candidates}{so_far}"
                )
            case Dropped(point, tiling, reason):
                self._line(f"[yellow]dropped[/yellow] {_of(point)} {escape(f'{tiling}: {reason}')}")
            case _:
                self._found(event)

    def _found(self, event: "Tuned") -> None:
        if event.microseconds is None:
            self._line(f"[yellow]nothing works[/yellow] {_of(event.point)}")
            return
        self.tuned += 1
        before = "" if event.usual is None else f" (before {event.usual:.1f})"
        self.faster += event.usual is None or event.microseconds < event.usual
        self._line(f"{_of(event.point)} {event.microseconds:.1f} µs{before} {escape(event.tiling)}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _of(point: "Point") -> str:
    return f"{escape(point.title)}, tokens {point.tokens}:"
