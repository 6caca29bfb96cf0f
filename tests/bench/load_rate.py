"""How fast weights are loaded, against how fast their files are read.

Run: python -m tests.bench.load_rate [--path CHECKPOINT] [--layers 30]. Without a path, of a checkpoint of
random bf16 weights, 30 MB a layer. Cold: after the kernel was asked to forget the files.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from moebius_worker.checkpoint.checkpoint import Checkpoint, open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from tests.worker.engine.large_checkpoint import write_large

CHUNK = 1 << 24


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    path = checkpoint.path
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def forget(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> None:
    buffer = bytearray(CHUNK)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        path = arguments.path
        if path is None:
            path = Path(made)
            write_large(path, layers=arguments.layers)
        checkpoint = open_checkpoint(str(path))
        files = weight_files(checkpoint)
        size = sum(file.stat().st_size for file in files)
        options = RunnerOptions(device="cpu", dtype=arguments.dtype, kv_cache_bytes=1 << 20)
        actions: dict[str, Callable[[], object]] = {
            "read": lambda: read(files),
            "load": lambda: ModelRunner.load(checkpoint, options),
        }
        print(f"{size / 1e9:.2f} GB in {len(files)} files; load average {os.getloadavg()[0]:.1f}")
        actions["load"]()  # what is done once a process is no part of the rate
        for state in ("cold", "warm"):
            taken: dict[str, float] = {}
            for name, action in actions.items():
                if state == "cold":
                    forget(files)
                taken[name] = seconds(action)
                print(f"{state} {name:<5}{taken[name]:7.2f} s {size / taken[name] / 1e9:7.2f} GB/s")
            print(f"{state} load at {taken['read'] / taken['load']:.0%} of the rate of reading")


if __name__ == "__main__":
    main()
