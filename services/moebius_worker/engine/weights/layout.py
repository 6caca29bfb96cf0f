"""From the names and stacks of a family's checkpoints to one tensor a projection and expert."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.reader import WeightReader

# What follows a stack's name, and what it is called at the single expert.
_KINDS = {
    "": "weight",
    ".weight": "weight",
    "_bias": "bias",
    ".bias": "bias",
    "_blocks": "weight_blocks",
    "_scales": "weight_scales",
    "_weight_scale": "weight_scale",
    "_weight_scale_2": "weight_scale_2",
    "_input_scale": "input_scale",
    "_scale_inv": "weight_scale_inv",
    ".weight_scale_inv": "weight_scale_inv",
    ".weight_scale": "weight_scale",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """Stored tensors named `<prefix>.<name><kind>` that hold projections of all experts, [E, ...].

    `name` is such as "experts.gate_up_proj": a single expert has its number and a part for the last word.
    `parts`: the projections, whose rows lie one after another, or, if `interleaved`, take turns.
    `transposed`: the kinds (as at a single expert) that are stored inputs first.
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool = False
    transposed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's checkpoints differ from what its model names.

    `renames`: regular expressions and replacements, each applied in turn. `stacks`: of experts. `ignored`:
    regular expressions of whole names, after the renames, that the model leaves out on purpose.
    """

    renames: tuple[tuple[str, str], ...] = ()
    stacks: tuple[Stack, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Cut:
    """What of a stored tensor is meant: the whole if `expert` is None."""

    stored: str
    expert: int | None = None
    transposed: bool = False
    # Of `of` parts the one with this number.
    part: int = 0
    of: int = 1
    interleaved: bool = False

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.expert is None:
            return tensor
        tensor = tensor[self.expert]
        if self.transposed and tensor.ndim > 1:
            tensor = tensor.transpose(0, 1)
        if self.of == 1 or not tensor.ndim:
            return tensor
        return tensor[self.part :: self.of] if self.interleaved else tensor.chunk(self.of)[self.part]

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.apply(torch.empty(stored, device="meta")).shape)


@dataclass
class LaidOut:
    """A reader whose tensors are named and divided as the model's are."""

    reader: WeightReader
    tensors: Mapping[str, TensorInfo]
    # Stored names that the model leaves out on purpose.
    left_out: Sequence[str]
    _cuts: Mapping[str, _Cut]
    _last: tuple[str, torch.Tensor] | None = field(default=None)

    def read(self, name: str) -> torch.Tensor:
        cut = self._cuts[name]
        # All experts of a stack are read in turn.
        if self._last is None or self._last[0] != cut.stored:
            self._last = (cut.stored, self.reader.read(cut.stored))
        return cut.apply(self._last[1])


def lay_out(reader: WeightReader, layout: Layout) -> LaidOut:
    """Renames, divides, and leaves out what `layout` says.

    Raises CheckpointError for tensors that come to have one name, and for stacks of unlike experts.
    """
    ignored = [re.compile(pattern) for pattern in layout.ignored]
    named: list[tuple[str, str]] = []
    left_out: list[str] = []
    for stored in reader.tensors:
        name = stored
        for pattern, replacement in layout.renames:
            name = re.sub(pattern, replacement, name)
        if any(pattern.fullmatch(name) for pattern in ignored):
            left_out.append(stored)
        else:
            named.append((name, stored))
    experts = {
        found[:2]: reader.tensors[stored].shape[0]
        for name, stored in named
        if (found := _stack(name, layout.stacks)) and len(reader.tensors[stored].shape) > 1
    }
    tensors: dict[str, TensorInfo] = {}
    cuts: dict[str, _Cut] = {}
    for name, stored in named:
        info = reader.tensors[stored]
        pieces = dict(_pieces(name, stored, info, layout.stacks, experts))
        for piece, cut in pieces.items():
            if piece in cuts:
                raise CheckpointError(
                    f"{stored} in {info.file} is the same as {cuts[piece].stored} in {tensors[piece].file}: "
                    "which one is meant?"
                )
            nbytes = info.nbytes // len(pieces)
            tensors[piece] = TensorInfo(cut.shape(info.shape), info.dtype, info.file, nbytes)
            cuts[piece] = cut
    return LaidOut(reader, tensors, left_out, cuts)


def _stack(name: str, stacks: tuple[Stack, ...]) -> tuple[str, Stack, str] | None:
    """What precedes a single expert's number, the stack and the kind of a name; None if it is no stack's."""
    for stack in stacks:
        prefix, found, kind = name.rpartition(f".{stack.name}")
        if found and kind in _KINDS:
            return f"{prefix}.{stack.name.rpartition('.')[0]}", stack, _KINDS[kind]
    return None


def _pieces(
    name: str,
    stored: str,
    info: TensorInfo,
    stacks: tuple[Stack, ...],
    experts: Mapping[tuple[str, Stack], int],
) -> Iterator[tuple[str, _Cut]]:
    found = _stack(name, stacks)
    if found is None or found[:2] not in experts:
        yield name, _Cut(stored)
        return
    prefix, stack, kind = found
    count, *sizes = experts[prefix, stack], *info.shape
    rows = sizes[2 if kind in stack.transposed and len(sizes) > 2 else 1 :][:1]
    whole = all(size % len(stack.parts) == 0 for size in rows)
    if math.prod(sizes) != 1 and (sizes[0] != count or not whole or 0 in sizes):
        raise CheckpointError(
            f"{stored} is {sizes} in {info.file}, which is not {' and '.join(stack.parts)} of "
            f"{count} experts."
        )
    for expert in range(count):
        for number, part in enumerate(stack.parts):
            # A scale that a whole layer has in common is each expert's.
            cut = _Cut(stored)
            if math.prod(info.shape) > 1:
                transposed = kind in stack.transposed
                cut = _Cut(stored, expert, transposed, number, len(stack.parts), stack.interleaved)
            yield f"{prefix}.{expert}.{part}.{kind}", cut
