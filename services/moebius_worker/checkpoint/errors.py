"""The one error of everything that reads checkpoints."""


class CheckpointError(Exception):
    """A checkpoint cannot be found, read or used. The message names the file and says what to do."""
