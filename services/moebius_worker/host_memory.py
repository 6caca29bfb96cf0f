"""How much memory this process may still take: what the machine has, what its control groups allow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. `total` is what there would be if nobody else used any."""

    available: int
    total: int


def host_memory(root: Path = Path("/")) -> Memory:
    """The tightest of the machine and of every control group (version 1 or 2) that this process is in."""
    memories = [_machine(root / "proc/meminfo"), *_control_groups(root)]
    return Memory(min(one.available for one in memories), min(one.total for one in memories))


def _machine(meminfo: Path) -> Memory:
    kibibytes = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in meminfo.read_text().splitlines())
    }
    return Memory(kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024)


def _control_groups(root: Path) -> Iterator[Memory]:
    """Limits of this process's groups and of the groups above them."""
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, version = root / "sys/fs/cgroup", 2
        elif "memory" in controllers.split(","):
            mount, version = root / "sys/fs/cgroup/memory", 1
        else:
            continue
        # In a container the path may be the host's and not exist here; the container's own group is then
        # what is mounted at the top.
        group = mount / path.lstrip("/")
        while True:
            if (memory := _control_group(group, version)) is not None:
                yield memory
            if group == mount:
                break
            group = group.parent


def _control_group(group: Path, version: int) -> Memory | None:
    """None where the group sets no limit."""
    limit_name, usage_name, cache_name = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    if not (group / limit_name).is_file():
        return None
    limit = (group / limit_name).read_text().strip()
    if limit == "max":
        return None
    usage = int((group / usage_name).read_text())
    # Cached files count as used, but the kernel drops them when memory is asked for.
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = max(0, usage - int(stat.get(cache_name, 0)))
    return Memory(max(0, int(limit) - used), int(limit))
