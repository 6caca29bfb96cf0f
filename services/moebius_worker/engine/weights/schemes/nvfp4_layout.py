"""NVFP4 weights: packed codes, a factor for each 16 columns, and one for the matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.factors import need_row_factors, row_factors
from moebius_worker.engine.weights.schemes.module import ACTIVATIONS, Module


@dataclass(frozen=True, slots=True)
class Nvfp4Layout:
    """`data` U8 [R, C/2], `weight_scale` F8_E4M3 [R, C/16], `global_scale` F32.

    The global scale multiplies or, if `reciprocal`, divides.
    """

    data: str
    global_scale: str
    reciprocal: bool

    def form(self, module: Module) -> StoredForm:
        rows, packed = module.need(self.data, "NVFP4", "U8", (None, None)).shape
        columns = 2 * packed
        module.need("weight_scale", "NVFP4", "F8_E4M3", (rows, -(-columns // 16)))
        need_row_factors(module, self.global_scale, "NVFP4", "F32", rows)

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            factors = row_factors(read(module.tensor_name(self.global_scale)), rows)
            return {
                "data": read(module.tensor_name(self.data)),
                "scale": read(module.tensor_name("weight_scale")),
                "row_scale": factors.reciprocal() if self.reciprocal else factors,
            }

        sources = module.present(self.data, "weight_scale", self.global_scale, *ACTIVATIONS)
        return StoredForm(Nvfp4(), (rows, columns), sources, parts)
