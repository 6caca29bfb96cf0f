"""The stack file: which workers are to be kept alive. `moebius up` writes it, the controller reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's process."""

    name: str
    argv: tuple[str, ...]
    # host:port at which it answers gRPC.
    listen: str
    # Its output is appended here.
    log: Path
    # Added to the controller's own environment.
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StackSpec:
    workers: tuple[WorkerSpec, ...]


class StackFileError(Exception):
    """The stack file cannot be used."""


_ADAPTER = TypeAdapter(StackSpec)


def write_stack(path: Path, stack: StackSpec) -> None:
    path.write_bytes(_ADAPTER.dump_json(stack, indent=2))


def read_stack(path: Path) -> StackSpec:
    """Raises StackFileError."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise StackFileError(f"cannot read the stack file {path}: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise StackFileError(f"cannot read the stack file {path}: {where} {fault['msg']}") from error
