"""The controller's memory on disk: what it saw and did, for its successor and for `moebius status`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from moebius_controller.decide import Past
from moebius_controller.events import Event


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


def save_state(path: Path, state: ControllerState) -> None:
    """Readers see the old state or the new one, never a part."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(_ADAPTER.dump_json(state, indent=1))
    new.replace(path)


def load_state(path: Path) -> ControllerState | None:
    """None if there is no such file. Raises StateFileError."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateFileError(f"cannot read the controller's state {path}: {error.strerror}") from error
    except ValidationError as error:
        raise StateFileError(
            f"cannot read the controller's state {path}: {error.errors()[0]['msg']}"
        ) from error
