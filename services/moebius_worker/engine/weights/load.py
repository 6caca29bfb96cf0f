"""Fills a model's parameters from a checkpoint, strictly: each matrix in its stored form, one at a time."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import Format, FormatError, StoredMatrix
from moebius_kernels.formats.pack import packed_format
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.models.parameters import (
    WHOLE,
    Matrix,
    Place,
    Rank,
    Slot,
    Slots,
    Vector,
    own_expert,
)
from moebius_worker.engine.weights.reader import WeightReader
from moebius_worker.engine.weights.scheme import Scheme, StoredForm
from moebius_worker.engine.weights.schemes.kv_scales import is_kv_scale

# The tensor just loaded, and how many of how many stored bytes are done.
LoadProgress = Callable[[str, int, int], None]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Fill:
    """A slot and what fills it: a stored form, a plain tensor (no form), or nothing (`source` "")."""

    name: str
    slot: Slot
    source: str
    form: StoredForm | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Loading:
    """How a checkpoint fills a model; nothing has been read yet.

    `forms`: in which form each part of each matrix is kept. `zeros`: names of biases that the model has no
    place for, since quantisers write them, of zeros, for layers that have none.
    """

    reader: WeightReader
    fills: Sequence[Fill]
    forms: Mapping[Matrix, Mapping[str, Format]]
    vectors: Sequence[Vector]
    zeros: Sequence[str] = ()

    def allocate(self, place: Place, rank: Rank = WHOLE) -> None:
        """Gives all parameters memory; on the device "meta" sizes without memory. Raises CheckpointError."""
        try:
            for matrix, forms in self.forms.items():
                matrix.allocate(forms, place, rank)
        except FormatError as error:
            raise CheckpointError(f"The weights do not fit the model: {error}.") from error
        for vector in self.vectors:
            vector.allocate(place, rank)

    @property
    def nbytes(self) -> int:
        """Of the allocated parameters."""
        owners: list[Matrix | Vector] = [*self.forms, *self.vectors]
        return sum(tensor.nbytes for owner in owners for tensor in owner.tensors)

    @property
    def packed_nbytes(self) -> int:
        """Of the parameters that are not in the host's memory, once they are packed."""
        meta = torch.device("meta")
        matrices = sum(
            StoredMatrix.empty(packed_format(block.format), block.shape, meta).nbytes
            for matrix in self.forms
            if not matrix.host
            for block in matrix.blocks
        )
        return matrices + sum(vector.data.nbytes for vector in self.vectors)

    def pack(self) -> None:
        """For GPUs, after `fill`: one matrix after the other takes the form that kernels read."""
        for matrix in self.forms:
            matrix.pack()

    @property
    def host_nbytes(self) -> int:
        """Of those that stay in the host's memory, wherever the others are."""
        return sum(tensor.nbytes for matrix in self.forms if matrix.host for tensor in matrix.tensors)

    def stored_forms(self) -> Counter[str]:
        """How many bytes of the checkpoint are in which form, for people."""
        counts: Counter[str] = Counter()
        for fill in self.fills:
            counts[fill.form.format.name if fill.form else "vectors"] += fill.nbytes
        return counts

    @torch.no_grad()
    def fill(self, rank: Rank = WHOLE, progress: LoadProgress = lambda name, done, total: None) -> None:
        """Copies everything into the allocated memory. Raises CheckpointError."""
        total, done = sum(fill.nbytes for fill in self.fills), 0
        for fill in self.fills:
            expert = own_expert(fill.slot, rank)
            if expert is not None:
                if isinstance(fill.slot.owner, Vector):
                    self._fill_vector(fill, fill.slot.owner, expert, rank)
                else:
                    self._fill_matrix(fill, fill.slot.owner, expert, rank)
            done += fill.nbytes
            progress(fill.name, done, total)
        for name in self.zeros:
            if self.reader.read(name).any():
                file = self.reader.tensors[name].file
                raise CheckpointError(f"{name} in {file} is not 0, but the model has no place for it.")

    def _fill_vector(self, fill: Fill, owner: Vector, expert: int, rank: Rank) -> None:
        destination = owner.destination(fill.slot.part, expert)
        if not fill.source:
            assert owner.default is not None
            destination.copy_(torch.as_tensor(owner.default))
            return
        tensor = self.reader.read(fill.source)
        if tensor.is_floating_point() != destination.is_floating_point():
            info = self.reader.tensors[fill.source]
            needed = "floating-point numbers" if destination.is_floating_point() else "integers"
            raise CheckpointError(f"{fill.name} in {info.file} holds {info.dtype}, no {needed}.")
        destination.copy_(owner.own(tensor.reshape(fill.slot.shape), rank))

    def _fill_matrix(self, fill: Fill, owner: Matrix, expert: int, rank: Rank) -> None:
        assert fill.form is not None
        destination = owner.destination(fill.slot.part, expert)
        try:
            source = owner.own(fill.form.read(self.reader.read), rank)
        except FormatError as error:
            info = self.reader.tensors[fill.source]
            raise CheckpointError(f"{fill.name} in {info.file}: {error}.") from error
        _check_factors(fill, source, self.reader.tensors[fill.source].file)
        if source.format == destination.format:
            destination.copy_(source)
        else:
            _expand(source, destination)


def plan_loading(
    reader: WeightReader,
    scheme: Scheme,
    slots: Slots,
    ignored: Callable[[str], bool],
    *,
    dtype: torch.dtype,
    expand: bool,
) -> Loading:
    """Finds what fills each slot, without reading it.

    Names for which `ignored` is true are passed over. Floating-point matrices are kept in `dtype`, quantised
    ones as they are stored, or, if `expand`, in `dtype` too. Raises CheckpointError for tensors without a
    slot, slots without a tensor and unequal shapes, with the names, shapes and files.
    """
    stored = {
        name: info for name, info in reader.tensors.items() if not ignored(name) and not is_kv_scale(name)
    }
    used: set[str] = set()
    fills: list[Fill] = []
    missing: list[str] = []
    unequal: list[str] = []
    modules = {name.rpartition(".")[0] for name in stored}
    for name, slot in slots.items():
        needed = name if isinstance(slot.owner, Vector) else name.rpartition(".")[0]
        optional = isinstance(slot.owner, Vector) and slot.owner.default is not None
        if needed not in stored and needed not in modules and not optional:
            missing.append(f"{name} {list(slot.shape)}")
            continue
        fill, sources = _find(name, slot, scheme, stored)
        used.update(sources)
        fills.append(fill)
        shape = fill.form.shape if fill.form else stored[fill.source].shape if fill.source else slot.shape
        if shape != slot.shape and (fill.form or _squeezed(shape) != _squeezed(slot.shape)):
            file = stored[fill.source].file
            unequal.append(f"{name} is {list(shape)} in {file}, the model's {list(slot.shape)}")
    left = {name: info for name, info in stored.items() if name not in used}
    layers = {name.removesuffix(".weight") for name in slots}
    zeros = [name for name in left if name.endswith(".bias") and name.removesuffix(".bias") in layers]
    unused = [f"{name} {list(info.shape)} in {info.file}" for name, info in left.items() if name not in zeros]
    files = ", ".join(dict.fromkeys(info.file for info in reader.tensors.values())) or "the checkpoint"
    problems = [
        *_listed("tensors that the model has no place for", unused),
        *_listed(f"tensors that the model needs are not in {files}", missing),
        *_listed("tensors have another shape than the model", unequal),
    ]
    if problems:
        raise CheckpointError("The weights do not fit the model. " + " ".join(problems))
    order = {name: place for place, name in enumerate(stored)}
    fills.sort(key=lambda fill: order.get(fill.source, -1))
    vectors = dict.fromkeys(fill.slot.owner for fill in fills if isinstance(fill.slot.owner, Vector))
    return Loading(reader, fills, _kept_forms(fills, Dense(dtype), expand), list(vectors), zeros)


def check_copies(reader: WeightReader, copies: Mapping[str, str]) -> None:
    """Raises CheckpointError if the checkpoint has one of `copies`, names that a model leaves out, and it is
    not equal to the tensor of the name beside it."""
    for copy, name in copies.items():
        if copy in reader.tensors and not torch.equal(reader.read(copy), reader.read(name)):
            raise CheckpointError(
                f"{copy} in {reader.tensors[copy].file} is not {name}, though the config says that they are "
                "one (tie_word_embeddings). Correct the config, or remove the tensor."
            )


def _find(
    name: str, slot: Slot, scheme: Scheme, stored: Mapping[str, TensorInfo]
) -> tuple[Fill, tuple[str, ...]]:
    """What fills a slot, and all the tensors that this uses up."""
    if isinstance(slot.owner, Vector):
        if name not in stored:
            return Fill(name, slot, "", None, 0), ()
        return Fill(name, slot, name, None, stored[name].nbytes), (name,)
    form = scheme.form(name, stored)
    nbytes = sum(stored[source].nbytes for source in form.sources)
    return Fill(name, slot, form.sources[0], form, nbytes), form.sources


def _kept_forms(fills: Iterable[Fill], expanded: Format, expand: bool) -> dict[Matrix, dict[str, Format]]:
    """The form of each part. The experts of a layer that are stored in unlike forms are all expanded."""
    forms: dict[Matrix, dict[str, Format]] = {}
    for fill in fills:
        owner = fill.slot.owner
        if isinstance(owner, Vector) or fill.form is None:
            continue
        form = fill.form.format
        if not owner.host and (expand or owner.plain or isinstance(form, Dense)):
            form = expanded
        parts = forms.setdefault(owner, {})
        if parts.setdefault(fill.slot.part, form) != form:
            parts[fill.slot.part] = expanded
    return forms


def _check_factors(fill: Fill, source: StoredMatrix, file: str) -> None:
    """Raises CheckpointError for factors that would make all of a block NaN or infinite."""
    for name, part in source.parts.items():
        if name != "data" and part.is_floating_point() and not part.float().isfinite().all():
            raise CheckpointError(f"{fill.name} in {file} has factors ({name}) that are not finite.")


def _expand(source: StoredMatrix, destination: StoredMatrix) -> None:
    assert isinstance(destination.format, Dense)
    destination.parts["data"].copy_(
        source.parts["data"] if isinstance(source.format, Dense) else source.dequantize()
    )


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Without dimensions of 1, which conventions add and leave out: of convolutions and scalars."""
    return tuple(size for size in shape if size != 1)


def _listed(what: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return [f"{len(items)} {what}: {'; '.join(items[:_SHOWN])}{more}."]
