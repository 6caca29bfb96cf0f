"""The reader that fits a checkpoint."""

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.quantization import quantization_name

from .gguf import GgufReader
from .reader import WeightReader
from .safetensors import SafetensorsReader


def open_weights(checkpoint: Checkpoint) -> WeightReader:
    """Opens the weights, reading headers alone. Raises CheckpointError, also for what is quantised."""
    if (quantization := quantization_name(checkpoint.config)) is not None:
        raise CheckpointError(
            f"{checkpoint.path} is quantised with {quantization}, which is not supported. Supported are "
            "safetensors in bfloat16, float16 and float32, and GGUF files."
        )
    if checkpoint.container == "gguf":
        return GgufReader(checkpoint)
    return SafetensorsReader(checkpoint.path)
