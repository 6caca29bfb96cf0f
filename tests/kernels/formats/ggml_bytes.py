"""Random blocks of ggml's types."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.ggml import Ggml

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Where a block has fp16 numbers, in bytes; random bytes there would be infinite or none.
HALVES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
    Type.Q1_0: (0,),
    **dict.fromkeys((Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S), (0,)),
    **dict.fromkeys((Type.IQ3_XXS, Type.IQ3_S), (0,)),
}


def stored(type_: Type, data: np.ndarray) -> StoredMatrix:
    block, block_bytes = GGML_QUANT_SIZES[type_]
    shape = (*data.shape[:-1], data.shape[-1] // block_bytes * block)
    return StoredMatrix(Ggml(type_), shape, {"data": torch.from_numpy(data).to(DEVICE)})


def random_bytes(
    type_: Type, rows: int, blocks: int, magnitudes: tuple[float, float] = (-7, 3), seed: int = 0
) -> np.ndarray:
    """`magnitudes`: powers of ten, between which the fp16 numbers are; by default down to denormal ones."""
    generator = np.random.default_rng(int(type_) + 1000 * seed)
    block_bytes = GGML_QUANT_SIZES[type_][1]
    data = generator.integers(0, 256, (rows, blocks, block_bytes), np.uint8)
    for start in HALVES.get(type_, ()):
        numbers = generator.standard_normal((rows, blocks, 1)) * 10.0 ** generator.uniform(
            *magnitudes, (rows, blocks, 1)
        )
        data[..., start : start + 2] = numbers.astype(np.float16).view(np.uint8)
    if type_ == Type.IQ1_M:  # its fp16 is spread over the upper nibbles of the last eight bytes
        data[..., -1] &= 0x3F
    return data.reshape(rows, -1)
