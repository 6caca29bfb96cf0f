"""Loading takes no memory but the weights' own: measured in a process of its own, of 216 MB of weights."""

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moebius_common.garbage import collect_nothing_yet
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from tests.worker.engine.large_checkpoint import write_large

MB = 1_000_000
PAGE = resource.getpagesize()
# Besides weights: the largest tensor in its stored form and in the model's, allocators, the caches.
SLACK = 45 * MB


def own_memory() -> int:
    """Bytes of this process that are in memory and are no file's, which the kernel could drop."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE


def measure(path: str, dtype: str) -> dict[str, int]:
    """Loads; how far this process grew meanwhile, in its own memory and with the files that it mapped."""
    # As an engine does: tensors that have been read do not wait for a collection.
    collect_nothing_yet()
    begin, peak, stop = own_memory(), 0, threading.Event()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    reports: list[tuple[str, int, int]] = []
    options = RunnerOptions(dtype=dtype, kv_cache_bytes=MB, threads=1)
    runner = ModelRunner.load(open_checkpoint(path), options, lambda *report: reports.append(report))
    stop.set()
    watcher.join()
    # It may have been late.
    peak = max(peak, own_memory())
    done = [done for _, done, _ in reports]
    assert done == sorted(done)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    return {
        "own": peak - begin,
        "resident": grown * 1024,
        "reports": len(reports),
        "done": done[-1],
        "total": reports[-1][2],
        "vocabulary": runner.vocab_size,
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("large")
    return path, write_large(path)


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 1), ("float32", 2)])
def test_no_second_copy_and_progress_in_bytes(large: tuple[Path, int], dtype: str, times: int) -> None:
    path, nbytes = large
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.engine.test_load_memory", str(path), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["done"] == seen["total"] == nbytes
    assert seen["reports"] > 100
    weights = times * nbytes
    assert 0.9 * weights < seen["own"] < weights + SLACK
    # Of the files, one shard at a time is mapped.
    assert seen["resident"] < weights + nbytes / 3 + SLACK


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*sys.argv[1:])))
