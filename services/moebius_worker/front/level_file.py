"""The file that says on which fallback level a worker is to run: its pod's annotations, as Kubernetes writes
them into a volume."""

import re
from pathlib import Path

# Each annotation is a line: key="value", in which the value is escaped.
_LEVEL = re.compile(r'^moebius\.dev/fallback-level="(.*)"$', re.MULTILINE)


def read_level(path: Path) -> int | None:
    """0 if no level is asked for; None if that cannot be told from the file."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):
        return None
    found = _LEVEL.search(content)
    if found is None:
        return 0
    return int(found[1]) if re.fullmatch("[0-9]{1,6}", found[1]) else None
