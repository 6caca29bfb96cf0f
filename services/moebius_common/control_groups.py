"""The control groups that limit what this process may use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Directories of this process's groups and of those above them, with the version (1 or 2) of their files.

    `controller`: what they limit, such as "memory". `root`: where proc and sys are mounted.
    """
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return
    version: Literal[1, 2]
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            mount, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # In a container the path may be the host's and not exist here; the container's own group is then
        # what is mounted at the top.
        group = mount / path.lstrip("/")
        while True:
            yield group, version
            if group == mount:
                break
            group = group.parent
