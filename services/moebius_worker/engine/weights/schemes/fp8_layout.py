"""FP8 weights beside their factors: of the matrix, of each row, or of each block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.fp8 import Fp8
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.factors import need_row_factors, row_factors
from moebius_worker.engine.weights.schemes.module import ACTIVATIONS, Module
from moebius_worker.engine.weights.schemes.plain import SCALES


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """`weight` F8_E4M3 [R, C] and a `scale` that multiplies, also where it is called the inverse one.

    `block` (rows, columns), columns None for all; without `block`, the scale is one number or one a row.
    `activations`: they are declared as FP8 too. How they are rounded is then the product's matter: by token
    and group of columns, with factors of its own, which is no coarser than any scale that a file may have.
    """

    scale: str
    block: tuple[int, int] | None = None
    activations: bool = False

    def form(self, module: Module) -> StoredForm:
        rows, columns = module.need("weight", "FP8", "F8_E4M3", (None, None)).shape
        if self.block is None:
            form = Fp8(rounds_activations=self.activations)
            need_row_factors(module, self.scale, "FP8", SCALES, rows)
        else:
            form = Fp8(*self.block, self.activations)
            blocks = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            module.need(self.scale, f"FP8 in blocks {list(self.block)}", f"{SCALES} F8_E8M0", blocks)

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            scale = read(module.tensor_name(self.scale))
            return {
                "data": read(module.tensor_name("weight")),
                "scale": row_factors(scale, rows) if self.block is None else scale.float(),
            }

        sources = module.present("weight", self.scale, *ACTIVATIONS)
        return StoredForm(form, (rows, columns), sources, parts)


def block_size(declared: object, dialect: str) -> tuple[int, int]:
    """The two sizes that a config gives. Raises CheckpointError."""
    if (
        isinstance(declared, list | tuple)
        and len(declared) == 2
        and all(isinstance(size, int) and size > 0 for size in declared)
    ):
        return declared[0], declared[1]
    raise CheckpointError(f"{dialect} declares the block size {declared!r}, where [rows, columns] belong.")
