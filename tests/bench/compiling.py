"""Kernels compiled side by side, before any is timed."""

import os
import subprocess
import sys
import time


def compile_side_by_side(module: str) -> None:
    """Runs `module` with this program's arguments and `--compile PART PARTS`, a process for each CPU."""
    began = time.monotonic()
    parts = str(os.cpu_count() or 1)
    command = [sys.executable, "-m", module, *sys.argv[1:], "--compile"]
    workers = [subprocess.Popen([*command, str(part), parts]) for part in range(int(parts))]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
