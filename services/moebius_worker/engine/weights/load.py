"""Fills a model's parameters from a checkpoint, strictly, with one tensor at a time in memory beside them."""

from collections.abc import Callable, Iterable, Mapping

import torch

from moebius_worker.checkpoint.errors import CheckpointError

from .reader import WeightReader

# The tensor just loaded, and how many of how many stored bytes are done.
LoadProgress = Callable[[str, int, int], None]

_SHOWN = 5


def load_weights(
    reader: WeightReader,
    destinations: Mapping[str, torch.Tensor],
    ignored: Callable[[str], bool],
    progress: LoadProgress = lambda name, done, total: None,
) -> None:
    """Copies each tensor into the destination of its name, which may be a view into a fused parameter.

    Names for which `ignored` is true are passed over. Shapes must be equal; dtypes are converted, floating to
    floating. Before anything is read, CheckpointError is raised for tensors without a destination,
    destinations without a tensor and unequal shapes, with the names, shapes and files.
    """
    stored = {name: info for name, info in reader.tensors.items() if not ignored(name)}
    files = ", ".join(dict.fromkeys(info.file for info in reader.tensors.values())) or "the checkpoint"
    problems = [
        *_listed(
            "tensors that the model has no place for",
            (
                f"{name} {list(info.shape)} in {info.file}"
                for name, info in stored.items()
                if name not in destinations
            ),
        ),
        *_listed(
            f"tensors that the model needs are not in {files}",
            (f"{name} {list(view.shape)}" for name, view in destinations.items() if name not in stored),
        ),
        *_listed(
            "tensors have another shape than the model",
            (
                f"{name} is {list(info.shape)} in {info.file}, the model's {list(destinations[name].shape)}"
                for name, info in stored.items()
                if name in destinations and info.shape != tuple(destinations[name].shape)
            ),
        ),
    ]
    if problems:
        raise CheckpointError("The weights do not fit the model. " + " ".join(problems))
    total, done = sum(info.nbytes for info in stored.values()), 0
    with torch.no_grad():
        for name, info in stored.items():
            tensor = reader.read(name)
            if not tensor.is_floating_point():
                raise CheckpointError(f"{name} in {info.file} holds {info.dtype}, no floating-point numbers.")
            destinations[name].copy_(tensor)
            del tensor  # before the next is decoded
            done += info.nbytes
            progress(name, done, total)


def _listed(what: str, items: Iterable[str]) -> list[str]:
    found = list(items)
    if not found:
        return []
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [f"{len(found)} {what}: {'; '.join(found[:_SHOWN])}{more}."]
