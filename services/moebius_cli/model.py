"""From what the user wrote to a checkpoint on this machine, before any process is started for it."""

from moebius_worker.checkpoint.checkpoint import Checkpoint, open_checkpoint
from moebius_worker.checkpoint.locate import Progress
from moebius_worker.demo import demo_model


def prepare_model(location: str | None, progress: Progress) -> Checkpoint:
    """The checkpoint at `location`, downloaded if it is a Hugging Face id. Raises CheckpointError.

    None means the demo model, which is made on first use.
    """
    if location is None:
        progress("looking for the demo model", 0, 0)
        location = str(demo_model(progress=progress))
    return open_checkpoint(location, progress=progress)
