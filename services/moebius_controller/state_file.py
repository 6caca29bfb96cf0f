"""What the controller saw and did, for its successor and for `moebius status`; and how it is kept on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from moebius_controller.events import Event
from moebius_controller.types import Past


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A worker's process as it was last seen."""

    run: int
    # None when it is not running.
    pid: int | None = None
    # How it ended, if it did.
    death: str | None = None


@dataclass(frozen=True)
class ControllerState:
    pid: int
    history: Mapping[str, Past] = field(default_factory=dict)
    processes: Mapping[str, ProcessView] = field(default_factory=dict)
    # The oldest first.
    events: tuple[Event, ...] = ()


_ADAPTER = TypeAdapter(ControllerState)


class StateFileError(Exception):
    """The state file is not what a controller writes."""


class StaleMemoryError(Exception):
    """Somebody else has written the state since it was read."""


class Memory(Protocol):
    """Where the state is kept."""

    # What changes without an event, as in a rollout, is written no more often, in seconds.
    interval: float

    async def load(self) -> ControllerState | None:
        """None if there is none. Raises StateFileError if it cannot be used, OSError if it cannot be
        reached.
        """

    async def save(self, state: ControllerState) -> None:
        """Raises OSError; the next try is soon. Raises StaleMemoryError."""


class FileMemory:
    """Implements `Memory`."""

    interval = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path

    async def load(self) -> ControllerState | None:
        return load_state(self._path)

    async def save(self, state: ControllerState) -> None:
        save_state(self._path, state)


def write_state(state: ControllerState) -> bytes:
    """JSON, as short as it can be (a ConfigMap is limited): what is as it is by default is left out."""
    return _ADAPTER.dump_json(state, exclude_defaults=True)


def parse_state(data: bytes, where: str) -> ControllerState:
    """Raises StateFileError, which names `where` the data comes from."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise StateFileError(
            f"cannot read the controller's state {where}: {error.errors()[0]['msg']}"
        ) from error


def save_state(path: Path, state: ControllerState) -> None:
    """Readers see the old state or the new one, never a part."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(write_state(state))
    new.replace(path)


def load_state(path: Path) -> ControllerState | None:
    """None if there is no such file. Raises StateFileError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateFileError(f"cannot read the controller's state {path}: {error.strerror}") from error
    return parse_state(data, str(path))
