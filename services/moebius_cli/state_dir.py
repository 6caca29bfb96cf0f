"""The state directory: where `moebius up` leaves what `moebius status` and `moebius chat` need to find it.

lock              held by `moebius up` as long as it lives
up.json           who runs what: `UpRecord`
stack.json        the workers, for the controller
controller.json   what the controller saw and did
logs/             a file for each process
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from moebius_cli.errors import CliError
from moebius_controller.spec import StackSpec, write_stack

# Start times are kept since boot; as times of day they move with every correction of the clock.
_CLOCK_SECONDS = 60.0


@dataclass(frozen=True)
class UpRecord:
    """A stack that was started here, and may be running."""

    pid: int
    # Of process `pid`, as psutil has it: tells it from a later process with the same id.
    process_started: float
    url: str
    # The name that clients use.
    model: str
    gateway_pid: int
    controller_pid: int

    def alive(self) -> bool:
        try:
            started = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        return abs(started - self.process_started) < _CLOCK_SECONDS


_ADAPTER = TypeAdapter(UpRecord)


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/moebius`, or `~/.local/state/moebius`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "moebius"


@dataclass(frozen=True)
class StateDir:
    path: Path

    @property
    def stack_file(self) -> Path:
        return self.path / "stack.json"

    @property
    def controller_file(self) -> Path:
        return self.path / "controller.json"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def write_stack(self, stack: StackSpec) -> None:
        """Raises CliError."""
        try:
            write_stack(self.stack_file, stack)
        except OSError as error:
            raise CliError(
                f"Cannot write {self.stack_file} ({error.strerror}): "
                "choose another directory with --state-dir."
            ) from error
        except ValueError as error:
            raise CliError(
                "The path of the model or of the state directory is not UTF-8: rename what is not."
            ) from error

    def write_record(self, record: UpRecord) -> None:
        new = self.path / "up.json.new"
        new.write_bytes(_ADAPTER.dump_json(record, indent=1))
        new.replace(self.path / "up.json")

    def running(self) -> UpRecord | None:
        """The stack that runs here now."""
        try:
            record = _ADAPTER.validate_json((self.path / "up.json").read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CliError(f"Cannot read {self.path / 'up.json'}: {error.strerror}") from error
        except ValidationError as error:
            raise CliError(
                f"{self.path / 'up.json'} is damaged ({error.errors()[0]['msg']}): remove it, "
                "and end what still runs of its stack."
            ) from error
        return record if record.alive() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory and holds it. Raises CliError if another `moebius up` does."""
        try:
            self.log("x").parent.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise CliError(
                f"Cannot use the state directory {self.path} ({error.strerror}): "
                "choose another with --state-dir."
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CliError(self._already()) from error
            yield

    def clean(self) -> None:
        """Removes what an earlier stack left; its logs too, so that they tell of this one only. Nothing else.

        Raises CliError.
        """
        logs = [self.log("gateway"), self.log("controller"), *self.log("x").parent.glob("worker-*.log")]
        for file in (self.path / "up.json", self.stack_file, self.controller_file, *logs):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise CliError(
                    f"Cannot remove {file}, which an earlier stack left ({error.strerror}): remove it, "
                    "or choose another directory with --state-dir."
                ) from error

    def _already(self) -> str:
        record = self.running()
        where = f"at {record.url}" if record else "and still starting or stopping"
        return (
            f"The stack is already running {where}. Use it (moebius chat), stop it with Ctrl-C "
            "where it runs, or start another with --state-dir and --port."
        )
