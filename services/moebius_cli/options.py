"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from moebius_cli.state_dir import default_state_dir

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
