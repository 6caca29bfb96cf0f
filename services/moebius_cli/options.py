"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from moebius_cli.state_dir import default_state_dir

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
