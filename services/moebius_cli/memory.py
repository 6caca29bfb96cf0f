"""Does the model fit? An estimate before anything is started, against what this machine can still give."""

import math
from dataclasses import dataclass

from moebius_cli.errors import CliError
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.gguf.file import read_gguf
from moebius_worker.checkpoint.safetensors import read_headers

GIB = 2**30
# PyTorch, Python and the buffers of one worker, besides weights.
WORKER_BYTES = GIB // 2


# On a CPU a worker computes in float32, and keeps quantised weights as they are stored where they do not fit
# in float32 too.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FLOAT_BYTES = 4
_WIDE = {"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


@dataclass(frozen=True)
class MemoryNeed:
    """`weights`: bytes of one worker's."""

    weights: int
    workers: int

    @property
    def total(self) -> int:
        return self.workers * (self.weights + WORKER_BYTES)

    def check(self, available: int) -> None:
        """Raises CliError, with the numbers, if it does not fit."""
        if self.total <= available:
            return
        fitting = available // (self.total // self.workers)
        advice = f"Use --workers {fitting}." if fitting else "Free memory, or choose a smaller model."
        raise CliError(
            f"Not enough memory: {self.workers} worker(s) with weights of {self.weights / GIB:.1f} GiB each "
            f"need about {self.total / GIB:.1f} GiB, and {available / GIB:.1f} GiB are available. {advice}"
        )


def least_weight_bytes(checkpoint: Checkpoint) -> int:
    """What a checkpoint's weights take on a CPU at least, from the headers alone.

    Raises CheckpointError for files that cannot be read.
    """
    if checkpoint.container == "gguf":
        return sum(
            math.prod(tensor.shape) * _FLOAT_BYTES if tensor.type.name in _FLOATS else tensor.nbytes
            for tensor in read_gguf(checkpoint.path).tensors.values()
        )
    return sum(
        math.prod(tensor.shape) * (_FLOAT_BYTES if tensor.dtype in _FLOATS else _WIDE.get(tensor.dtype, 1))
        for tensor in read_headers(checkpoint.path).values()
    )
