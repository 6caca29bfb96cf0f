"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from moebius_cli.errors import CliError
from moebius_cli.state_dir import default_state_dir

# Of a model and of the worker that is to serve it.
ModelArgument = Annotated[
    str, typer.Argument(help="A checkpoint directory, a .gguf file, or a Hugging Face id (owner/name).")
]
LoadFormatOption = Annotated[
    str,
    typer.Option(help="As of the worker: auto, or dummy:FORM, random weights of that form."),
]
DtypeOption = Annotated[
    str, typer.Option(help="float32, bfloat16, float16. auto: as the worker would choose.")
]
PageSizeOption = Annotated[
    int, typer.Option(min=1, help="Tokens in a page of keys and values, as of the worker.")
]
KvCacheDtypeOption = Annotated[
    Literal["model", "fp8", "int8"], typer.Option(help="How keys and values are kept, as of the worker.")
]
StateDirOption = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        help="Where the stack leaves its state and logs; another directory is another stack.",
        envvar="MOEBIUS_STATE_DIR",
        default_factory=default_state_dir,
        show_default="~/.local/state/moebius",
        file_okay=False,
    ),
]


def dummy_form(load_format: str) -> str | None:
    """The form of random weights, None for the checkpoint's own. Raises CliError."""
    kind, _, form = load_format.partition(":")
    if load_format != "auto" and kind != "dummy":
        raise CliError(f"--load-format {load_format!r}: choose auto or dummy:FORM, such as dummy:nvfp4.")
    return None if load_format == "auto" else form or "bf16"
