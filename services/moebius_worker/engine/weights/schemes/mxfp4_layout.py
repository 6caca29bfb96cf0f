"""MXFP4 weights: packed codes, and a power of two for each 32 columns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.module import ACTIVATIONS, Module

# All other exponents are powers of two, from -127 on.
_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    """`data` U8 [R, C/2] or, in `blocks`, [R, C/32, 16]; `scale` U8 [R, C/32], E8M0."""

    data: str
    scale: str
    blocks: bool

    def form(self, module: Module) -> StoredForm:
        shape = (None, None, 16) if self.blocks else (None, None)
        rows, *packed = module.need(self.data, "MXFP4", "U8", shape).shape
        columns = 32 * packed[0] if self.blocks else 2 * packed[0]
        module.need(self.scale, "MXFP4", "U8 F8_E8M0", (rows, -(-columns // 32)))

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            scale = read(module.tensor_name(self.scale)).view(torch.uint8)
            if (scale == _NAN).any():
                raise CheckpointError(f"{module.tensor_name(self.scale)} in {module.files()} holds NaN.")
            return {"data": read(module.tensor_name(self.data)).reshape(rows, columns // 2), "scale": scale}

        sources = module.present(self.data, self.scale, *ACTIVATIONS)
        return StoredForm(Mxfp4(), (rows, columns), sources, parts)
