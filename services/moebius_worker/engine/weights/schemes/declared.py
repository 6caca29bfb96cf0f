"""The scheme of every dialect: the config declares a layout for a module, the tensors are held against it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.scheme import StoredForm
from moebius_worker.engine.weights.schemes.module import Module
from moebius_worker.engine.weights.schemes.plain import FLOATING, plain_form

# What a module has beside its weight, or in place of it, only if it is quantised.
_QUANTISED = (
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_zero_point",
    "weight_blocks",
    "weight_scales",
    "qweight",
    "qzeros",
    "scales",
)


class Layout(Protocol):
    """The tensors that a dialect stores a quantised module in."""

    def form(self, module: Module) -> StoredForm:
        """Raises CheckpointError for tensors that are missing or of another dtype or shape."""
        ...


@dataclass(frozen=True, slots=True)
class DeclaredScheme:
    """`layout_of` tells what the config declares for a module; None where it is not quantised.

    A module that is declared quantised may be stored in floating point nevertheless: configs tell "all linear
    layers", and which layers a producer counts among them (routers, embeddings) differs.
    """

    name: str
    layout_of: Callable[[str], Layout | None]

    def form(self, weight: str, tensors: Mapping[str, TensorInfo]) -> StoredForm:
        if not weight.endswith(".weight"):
            return plain_form(weight, tensors)
        module = Module(weight.removesuffix(".weight"), tensors)
        marks = module.present(*_QUANTISED)
        stored = tensors.get(weight)
        if not marks and stored is not None and stored.dtype in FLOATING:
            return plain_form(weight, tensors)
        layout = self.layout_of(module.name)
        if layout is not None:
            return _whole_blocks(layout.form(module), module)
        if marks:
            mark = tensors[marks[0]]
            raise CheckpointError(
                f"{marks[0]} is {mark.dtype} {list(mark.shape)} in {mark.file}, "
                f"but the config ({self.name}) declares no quantisation of {module.name}."
            )
        return plain_form(weight, tensors)


def _whole_blocks(form: StoredForm, module: Module) -> StoredForm:
    columns, block = form.shape[-1], form.format.column_block
    if columns % block:
        raise CheckpointError(
            f"{form.sources[0]} in {module.files()} has {columns} columns, "
            f"which is no multiple of the {block} that {form.format.name} stores together."
        )
    return form
