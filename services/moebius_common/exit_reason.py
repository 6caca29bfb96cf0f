"""How a process ended, in words for people."""

import signal
from pathlib import Path

_LAST_WORDS_BYTES = 4096


def exit_reason(status: int) -> str:
    """What to say after the process's name. `status` is negative for a signal, as `subprocess` has it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def last_line(log: Path) -> str:
    """The last thing that a process wrote to its log; empty if it wrote nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_WORDS_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"(its log cannot be read: {error.strerror})"
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
