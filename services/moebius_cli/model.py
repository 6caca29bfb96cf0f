"""From what the user wrote to a checkpoint on this machine, before any process is started for it."""

from collections.abc import Callable
from pathlib import Path

from moebius_cli.errors import CliError
from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint

# What is done, and how many of how many bytes.
Progress = Callable[[str, int, int], None]


def prepare_model(location: str | None, progress: Progress) -> Checkpoint:
    """The checkpoint at `location`, downloaded if it is a Hugging Face id. Raises CliError.

    None means the demo model, which is made on first use.
    """
    try:
        if location is None:
            location = str(_demo_model(progress))
        return open_checkpoint(location, progress=progress)
    except CheckpointError as error:
        raise CliError(str(error)) from error


def _demo_model(progress: Progress) -> Path:
    progress("looking for the demo model", 0, 0)
    # Late: it loads PyTorch.
    from moebius_worker.demo import demo_model

    return demo_model(progress=progress)
