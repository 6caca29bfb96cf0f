"""The reader and the scheme that fit a checkpoint."""

from moebius_worker.checkpoint.checkpoint import Checkpoint

from .gguf import GgufReader
from .layout import Layout, lay_out
from .reader import WeightReader
from .safetensors import SafetensorsReader
from .scheme import Scheme
from .schemes.plain import plain_form


class _Temporary:
    name = "plain"
    form = staticmethod(plain_form)


def open_weights(checkpoint: Checkpoint, layout: Layout = Layout()) -> tuple[WeightReader, Scheme]:
    """Opens the weights under the names that the family gives them, reading headers alone.

    `layout` is that of the family's safetensors. Raises CheckpointError, also for a dialect of quantisation that
    is not known.
    """
    if checkpoint.container == "gguf":
        return GgufReader(checkpoint), _Temporary()
    return lay_out(SafetensorsReader(checkpoint.path), layout), _Temporary()
