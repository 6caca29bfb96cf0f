"""Does the model fit? An estimate before anything is started, against what this machine can still give."""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from moebius_cli.errors import CliError
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.gguf_file import read_gguf

GIB = 2**30
# PyTorch, Python and the buffers of one worker, besides weights.
WORKER_BYTES = GIB // 2


@dataclass(frozen=True)
class MemoryNeed:
    parameters: int
    bytes_per_parameter: int
    workers: int

    @property
    def total(self) -> int:
        return self.workers * (self.parameters * self.bytes_per_parameter + WORKER_BYTES)

    def check(self, available: int) -> None:
        """Raises CliError, with the numbers, if it does not fit."""
        if self.total <= available:
            return
        fitting = available // (self.total // self.workers)
        advice = f"Use --workers {fitting}." if fitting else "Free memory, or choose a smaller model."
        raise CliError(
            f"Not enough memory: {self.workers} worker(s) with {self.parameters / 1e6:.0f} million "
            f"parameters in {self.bytes_per_parameter} bytes each need about {self.total / GIB:.1f} GiB, and "
            f"{available / GIB:.1f} GiB are available. {advice}"
        )


def count_parameters(checkpoint: Checkpoint) -> int:
    """From the headers alone. Raises CheckpointError or CliError for files that cannot be read."""
    if checkpoint.container == "gguf":
        shapes = [tensor.shape for tensor in read_gguf(checkpoint.path).tensors.values()]
    else:
        shapes = [
            shape
            for file in sorted(checkpoint.path.glob("*.safetensors"))
            if not file.name.startswith("consolidated")
            for shape in _safetensors_shapes(file)
        ]
    return sum(math.prod(shape) for shape in shapes)


def available_memory(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes that this machine, and each control group that this process is in, can still give."""
    return min((psutil.virtual_memory().available, *_cgroup_headrooms(cgroup_root, membership)))


def _safetensors_shapes(file: Path) -> list[tuple[int, ...]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        return [tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, MemoryError, OverflowError) as error:
        raise CliError(f"{file} is damaged or truncated: download it again. ({error})") from error


def _cgroup_headrooms(root: Path, membership: Path) -> Iterator[int]:
    """What is left below the limit of each control group from our own up to the root, v2 and v1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return  # Not Linux.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (base / relative, *(base / parent for parent in relative.parents)):
            yield from _headroom(group, *names)


def _headroom(group: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return  # No limit is set here, or the group is outside of what a container sees.
    if limit != "max":
        # Cached file pages count as used, and are given back on demand.
        yield max(0, int(limit) - usage + int(stat.get(cache_name, "0")))
