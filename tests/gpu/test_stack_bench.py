"""`make gpu-bench-stack` works, shown with a model that needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_bench_of_the_whole_stack(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = ("--device", "cpu", "--streams", "2", "--prompt", "8", "--output", "6", "--out", str(out))
    command = (sys.executable, "-m", "tests.bench.gpu_stack", "tiny", *flags)
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [figures] = json.loads(out.read_text())["figures"]
    assert list(figures["starts"]) == ["cold", "warm", "engine"]
    for name, start in figures["starts"].items():
        assert sum(start["phases"].values()) <= start["seconds"]
        assert "starting PyTorch" in start["phases"]
        assert f"{name}: {start['seconds']:.1f} s to READY" in done.stdout
    [row] = figures["rates"]
    assert row["streams"] == 2
    assert min(row["engine"], row["worker"], row["stack"]) > 0
    assert row["percent"] == 100 * row["stack"] / row["engine"]
