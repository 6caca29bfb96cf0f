"""A tiny Mixtral out of a GGUF file, all of whose matrices are of one type."""

from pathlib import Path

import gguf
import libgguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import gguf_tensors, llama_metadata, write_gguf

# Of types for which llama.cpp's quantiser makes tables for seconds, the factor of random codes that are about
# as large as the others' weights. It is the first number of a block, but in IQ1_M.
_SLOW = {Type.IQ1_S: 0.01, Type.IQ1_M: 0.01, Type.IQ2_XXS: 0.001, Type.IQ2_XS: 0.001, Type.IQ2_S: 0.001}


def write_typed(type_: Type, folder: Path) -> Path:
    """The router and the norms are in fp32, as llama.cpp leaves them."""
    checkpoint = write_checkpoint(
        folder / "float", hidden_size=256, intermediate_size=256, head_dim=64, max_position_embeddings=256
    )
    tensors, types = {}, {}
    for name, array in gguf_tensors(checkpoint).items():
        if array.ndim > 1 and "gate_inp" not in name:
            tensors[name], types[name] = _stored(name, 0.4 * array, type_), type_
        else:
            tensors[name] = array
    path = folder / f"{type_.name.lower()}.gguf"
    return write_gguf(path, llama_metadata(checkpoint), tensors, lambda name, _: types.get(name, Type.F32))


def _stored(name: str, array: np.ndarray, type_: Type) -> np.ndarray:
    if type_ not in _SLOW:
        rows = libgguf.quantize_rows(array.reshape(-1, array.shape[-1]), type_)
        return rows.reshape(*array.shape[:-1], -1)
    block, nbytes = gguf.GGML_QUANT_SIZES[type_]
    source = np.random.default_rng(sum(name.encode()))
    data = source.integers(0, 256, (array.size // block, nbytes), np.uint8)
    factor = np.float16(_SLOW[type_])
    if type_ == Type.IQ1_M:
        for place in range(4):
            nibble = int(factor.view(np.uint16)) >> 4 * place & 15
            data[:, 49 + 2 * place] = data[:, 49 + 2 * place] & 15 | nibble << 4
    else:
        data[:, :2] = np.frombuffer(factor.tobytes(), np.uint8)
    return data.reshape(*array.shape[:-1], -1)
