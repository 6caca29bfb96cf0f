"""The reader and the scheme that fit a checkpoint."""

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.weights.gguf import GgufReader
from moebius_worker.engine.weights.layout import Layout, lay_out
from moebius_worker.engine.weights.reader import WeightReader
from moebius_worker.engine.weights.safetensors import SafetensorsReader
from moebius_worker.engine.weights.scheme import Scheme
from moebius_worker.engine.weights.schemes.registry import scheme_of


def open_weights(checkpoint: Checkpoint, layout: Layout | None = None) -> tuple[WeightReader, Scheme]:
    """Opens the weights under the names that the family gives them, reading headers alone.

    `layout` is that of the family's safetensors. Raises CheckpointError, also for an unknown dialect of
    quantisation.
    """
    scheme = scheme_of(checkpoint)
    if checkpoint.container == "gguf":
        return GgufReader(checkpoint), scheme
    return lay_out(SafetensorsReader(checkpoint.path), layout or Layout()), scheme
