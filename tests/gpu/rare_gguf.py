"""A tiny model in GGUF, each of whose layers is in another of the types that are packed into larger ones."""

from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tests.kernels.formats.ggml_bytes import random_bytes
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import gguf_tensors, llama_metadata, write_gguf

RARE = (
    *(Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S),
    *(Type.TQ1_0, Type.TQ2_0, Type.Q1_0),
)


def write_rare_gguf(directory: Path) -> Path:
    """Mixtral, without a vocabulary; its experts and its attention are random blocks."""
    config = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": len(RARE)}
    source = write_checkpoint(directory / "float", "mixtral", **config)
    tensors, types = gguf_tensors(source), {}
    for name, array in tensors.items():
        if name.startswith("blk.") and array.shape[-1] == 256 and array.ndim > 1 and "gate_inp" not in name:
            type_ = RARE[int(name.split(".")[1])]
            rows = array.size // 256
            data = random_bytes(type_, rows, 2 if type_ == Type.Q1_0 else 1, (-3, -2), len(types))
            tensors[name], types[name] = data.reshape(*array.shape[:-1], -1), type_
    path = directory / "rare.gguf"
    return write_gguf(path, llama_metadata(source), tensors, lambda name, _: types.get(name, Type.F32))
