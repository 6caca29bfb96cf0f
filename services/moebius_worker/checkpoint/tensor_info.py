"""A tensor of a checkpoint, unread."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """As it is stored: `dtype` in the container's words ("BF16", "Q4_K"), `nbytes` in the file."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int
