"""Does the model fit? An estimate before anything is started, against what this machine can still give."""

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from moebius_cli.errors import CliError
from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError
from moebius_worker.checkpoint.gguf.file import read_gguf

GIB = 2**30
# PyTorch, Python and the buffers of one worker, besides weights.
WORKER_BYTES = GIB // 2


@dataclass(frozen=True)
class MemoryNeed:
    parameters: int
    bytes_per_parameter: int
    workers: int

    @property
    def total(self) -> int:
        return self.workers * (self.parameters * self.bytes_per_parameter + WORKER_BYTES)

    def check(self, available: int) -> None:
        """Raises CliError, with the numbers, if it does not fit."""
        if self.total <= available:
            return
        fitting = available // (self.total // self.workers)
        advice = f"Use --workers {fitting}." if fitting else "Free memory, or choose a smaller model."
        raise CliError(
            f"Not enough memory: {self.workers} worker(s) with {self.parameters / 1e6:.0f} million "
            f"parameters in {self.bytes_per_parameter} bytes each need about {self.total / GIB:.1f} GiB, and "
            f"{available / GIB:.1f} GiB are available. {advice}"
        )


def count_parameters(checkpoint: Checkpoint) -> int:
    """From the headers alone. Raises CheckpointError for files that cannot be read."""
    if checkpoint.container == "gguf":
        shapes = [tensor.shape for tensor in read_gguf(checkpoint.path).tensors.values()]
    else:
        shapes = [
            shape
            for file in sorted(checkpoint.path.glob("*.safetensors"))
            if not file.name.startswith("consolidated")
            for shape in _safetensors_shapes(file)
        ]
    return sum(math.prod(shape) for shape in shapes)


def _safetensors_shapes(file: Path) -> list[tuple[int, ...]]:
    try:
        with safe_open(file, framework="np") as tensors:
            return [tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}. Download it again.") from error
