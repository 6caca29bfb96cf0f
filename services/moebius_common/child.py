"""Starts commands that die with the process that started them, however that ends (on Linux).

Run as a program, this file asks the kernel for SIGKILL at its parent's death and becomes the command; both
survive `exec`. Doing so between fork and exec, in Python, is not safe in a process that has threads.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1


def dies_with_us(*command: str) -> tuple[str, ...]:
    """The command line to start instead of `command`, from a thread that lives as long as this process.

    The process id is that of the command.
    """
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def end_of(log: Path) -> BinaryIO:
    """Where a command's output goes: it is added to the file `log`, whose folder is made. Nowhere if the disk
    does not let it: what serves is worth more than what it would say. Raises OSError."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _become(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted this one is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
