"""AWQ in AutoAWQ's "gemm" order, also as AutoRound writes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moebius_kernels.formats.codes import pack_nibbles
from moebius_kernels.formats.int_group import IntGroup
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.declared import DeclaredScheme
from moebius_worker.engine.weights.schemes.gptq import check_symmetric, group_size
from moebius_worker.engine.weights.schemes.int_layouts import unpack_words
from moebius_worker.engine.weights.schemes.module import Module
from moebius_worker.engine.weights.schemes.patterns import matcher
from moebius_worker.engine.weights.schemes.plain import FLOATING, SCALES

# The nibble of a 32-bit word that each of its 8 columns is in.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """`qweight` I32 [C, R/8], `qzeros` I32 [C/group, R/8], `scales` [C/group, R]: value (q - z) * s."""

    group: int | None
    zero_point: bool

    def form(self, module: Module) -> StoredForm:
        columns, words = module.need("qweight", "AWQ", "I32", (None, None)).shape
        rows = 8 * words
        groups = -(-columns // self.group) if self.group else 1
        scales = module.need("scales", "AWQ", SCALES, (groups, rows))
        module.need("qzeros", "AWQ", "I32", (groups, words))

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            components = {
                "data": pack_nibbles(_in_order(read(module.tensor_name("qweight"))).t()).contiguous(),
                "scale": read(module.tensor_name("scales")).t().contiguous(),
            }
            zero = _in_order(read(module.tensor_name("qzeros"))).t().contiguous()
            if self.zero_point:
                components["zero"] = zero
            else:
                check_symmetric(zero, 4, module)
            return components

        form = IntGroup(4, self.group, self.zero_point, FLOATING[scales.dtype])
        return StoredForm(form, (rows, columns), module.present("qweight", "qzeros", "scales"), parts)


def awq_scheme(config: Mapping[str, Any]) -> DeclaredScheme:
    """Raises CheckpointError for what is not supported."""
    bits, version = config.get("bits"), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(
            f"awq of {bits} bits in the order {version} is not supported; 4 bits in the order gemm are."
        )
    layout = AwqLayout(group_size(config, "awq"), config.get("zero_point", True))
    excluded = matcher(config.get("modules_to_not_convert") or ())
    return DeclaredScheme("awq 4-bit", lambda module: None if excluded(module) else layout)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8 n] of the words [..., n], the columns in their own order."""
    return unpack_words(words, 4).unflatten(-1, (-1, 8))[..., _ORDER].flatten(-2)
