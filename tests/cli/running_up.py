"""`moebius up` as a child process, seen from outside: its output, its commands, its processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ports import free_port
from tests.stack import MOEBIUS, START_TIMEOUT
from tests.waiting import PATIENCE, wait_for


def moebius(
    *arguments: object, stdin: str = "", seconds: float = PATIENCE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [MOEBIUS, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | env,
    )


@dataclass(frozen=True)
class RunningUp:
    process: subprocess.Popen[bytes]
    model: Path
    state_dir: Path
    url: str
    output_file: Path

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def says(self, words: str, seconds: float = START_TIMEOUT) -> None:
        """Waits until it says that."""
        wait_for(
            lambda: words in self.output or self.process.poll() is not None,
            f"{words!r} in:\n{self.output}",
            seconds,
        )
        assert words in self.output, self.output

    def command(
        self, name: str, *arguments: object, stdin: str = "", seconds: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        """Another command of the same stack."""
        return moebius(name, "--state-dir", self.state_dir, *arguments, stdin=stdin, seconds=seconds)

    def family(self) -> list[psutil.Process]:
        """Every process that it started, and those that these started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self) -> list[psutil.Process]:
        return [process for process in self.family() if "moebius_worker.engine" in process.cmdline()]

    def ended(self, seconds: float = PATIENCE) -> int:
        """Waits for its end; returns its exit status."""
        return self.process.wait(seconds)


@contextmanager
def running_up(model: Path, state_dir: Path, *flags: str, **env: str) -> Iterator[RunningUp]:
    """Starts it; does not wait until it is ready. At the end it is killed, if it still runs."""
    state_dir.mkdir(parents=True, exist_ok=True)
    output_file = state_dir / "up.log"
    port = free_port()
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [MOEBIUS, "up", "--model", model, "--port", str(port), "--state-dir", state_dir, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        )
    try:
        yield RunningUp(process, model, state_dir, f"http://127.0.0.1:{port}", output_file)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def assert_gone(processes: list[psutil.Process]) -> None:
    """None of them is left; one that ended and was not waited for does not count."""
    assert processes
    wait_for(lambda: not left(processes), f"these are gone: {processes}")


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and not is_zombie(process)]


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def mentioning(path: Path) -> list[psutil.Process]:
    """The processes of this machine that have `path` in their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(path) in word for word in process.info["cmdline"] or ()) and not is_zombie(process):
            found.append(process)
    return found
