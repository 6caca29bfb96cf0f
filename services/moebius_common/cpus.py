"""How many CPUs this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from moebius_common.control_groups import control_groups


def cpu_count(root: Path = Path("/")) -> int:
    """Those that it is bound to, but no more than its control groups give it time on, rounded up."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """In CPUs; none for a group without a limit."""
    for group, version in control_groups("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        files = [group / name for name in names]
        if all(file.is_file() for file in files):
            quota, period = " ".join(file.read_text() for file in files).split()
            # Version 2 says "max", version 1 says -1.
            if quota.isdecimal():
                yield int(quota) / int(period)
