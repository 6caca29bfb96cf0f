"""How much memory this process may still take: what the machine has, what its control groups allow."""

from dataclasses import dataclass
from pathlib import Path

from moebius_common.control_groups import control_groups


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes. `total` is what there would be if nobody else used any."""

    available: int
    total: int


def host_memory(root: Path = Path("/")) -> Memory:
    """The tightest of the machine and of every control group (version 1 or 2) that this process is in."""
    groups = (_control_group(group, version) for group, version in control_groups("memory", root))
    memories = [_machine(root / "proc/meminfo"), *(memory for memory in groups if memory is not None)]
    return Memory(min(one.available for one in memories), min(one.total for one in memories))


def _machine(meminfo: Path) -> Memory:
    kibibytes = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in meminfo.read_text().splitlines())
    }
    return Memory(kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024)


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
