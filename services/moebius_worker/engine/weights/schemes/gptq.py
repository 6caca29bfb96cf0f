"""GPTQ, version 1 (zero points stored less 1) and 2, without reordered columns."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moebius_kernels.formats.int_group import IntGroup
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.declared import DeclaredScheme, Layout
from moebius_worker.engine.weights.schemes.int_layouts import unpack_words
from moebius_worker.engine.weights.schemes.module import Module
from moebius_worker.engine.weights.schemes.patterns import expression, spellings
from moebius_worker.engine.weights.schemes.plain import FLOATING, SCALES


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """`qweight` I32 [C * bits/32, R], `qzeros` I32 [C/group, R * bits/32], `scales` [C/group, R], `g_idx`.

    Value: (q - z) * s, where z is the stored one plus `zero_offset`.
    """

    bits: Literal[4, 8]
    group: int | None
    symmetric: bool
    zero_offset: int

    def form(self, module: Module) -> StoredForm:
        per_word = 32 // self.bits
        words, rows = module.need("qweight", "GPTQ", "I32", (None, None)).shape
        columns = words * per_word
        groups = -(-columns // self.group) if self.group else 1
        scales = module.need("scales", "GPTQ", SCALES, (groups, rows))
        module.need("qzeros", "GPTQ", "I32", (groups, -(-rows // per_word)))
        if module.find("g_idx") is not None:
            module.need("g_idx", "GPTQ", "I32 I64", (columns,))

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            if module.find("g_idx") is not None:
                self._check_order(read(module.tensor_name("g_idx")), module)
            components = {
                "data": read(module.tensor_name("qweight")).t().contiguous().view(torch.uint8),
                "scale": read(module.tensor_name("scales")).t().contiguous(),
            }
            stored = unpack_words(read(module.tensor_name("qzeros")), self.bits)[:, :rows]
            zero = (stored + self.zero_offset & (1 << self.bits) - 1).t().contiguous()
            if self.symmetric:
                check_symmetric(zero, self.bits, module)
            else:
                components["zero"] = zero
            return components

        form = IntGroup(self.bits, self.group, not self.symmetric, FLOATING[scales.dtype])
        return StoredForm(
            form, (rows, columns), module.present("qweight", "qzeros", "scales", "g_idx"), parts
        )

    def _check_order(self, groups: torch.Tensor, module: Module) -> None:
        columns = torch.arange(len(groups))
        if not torch.equal(groups.long(), columns // self.group if self.group else 0 * columns):
            raise CheckpointError(
                f"{module.tensor_name('g_idx')} in {module.files()} puts columns into groups out of "
                "their order (desc_act), which is not supported."
            )


def gptq_scheme(config: Mapping[str, Any]) -> DeclaredScheme:
    """Raises CheckpointError for what is not supported."""
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"gptq in the format {version} is not supported. Of gptq's, gptq and gptq_v2 are."
        )
    layout = _layout(config, version)
    # GPTQModel's exceptions by regular expression: "-:" is not quantised, "+:" or nothing has other settings.
    exceptions: list[tuple[re.Pattern[str], Layout | None]] = []
    for pattern, changed in (config.get("dynamic") or {}).items():
        named = expression(pattern.removeprefix("-:").removeprefix("+:"))
        exception = None if pattern.startswith("-:") else _layout({**config, **changed}, version)
        exceptions.append((named, exception))

    def layout_of(module: str) -> Layout | None:
        names = spellings(module)
        for named, exception in exceptions:
            if any(named.match(name) for name in names):
                return exception
        return layout

    return DeclaredScheme(f"gptq {config.get('bits')}-bit", layout_of)


def _layout(config: Mapping[str, Any], version: str) -> GptqLayout:
    bits = config.get("bits")
    if bits not in (4, 8):
        raise CheckpointError(f"gptq with {bits} bits is not supported; 4 and 8 are.")
    if config.get("desc_act"):
        raise CheckpointError("gptq with desc_act (columns in another order) is not supported.")
    return GptqLayout(
        bits, group_size(config, "gptq"), config.get("sym", True), zero_offset=1 if version == "gptq" else 0
    )


def group_size(config: Mapping[str, Any], dialect: str) -> int | None:
    """The columns of a group; None for one group a row, which the configs call -1. Raises CheckpointError."""
    size = config.get("group_size")
    if not isinstance(size, int) or (size <= 0 and size != -1):
        raise CheckpointError(
            f"{dialect} declares the group size {size!r}, where a positive number or -1 belongs."
        )
    return None if size == -1 else size


def check_symmetric(zero: torch.Tensor, bits: int, module: Module) -> None:
    """Raises CheckpointError if the zero points are not half the range."""
    if (wrong := zero[zero != 1 << bits - 1]).numel():
        raise CheckpointError(
            f"{module.tensor_name('qzeros')} in {module.files()} holds the zero point {wrong[0].item()}, but "
            f"the config declares symmetric quantisation, where all are {1 << bits - 1}."
        )
