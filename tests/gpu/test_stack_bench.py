"""`make gpu-bench-stack` works, shown with a model that needs no GPU."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.bench import gpu_stack

FLAGS = ("--device", "cpu", "--streams", "2", "--prompt", "8", "--output", "6")


def bench(*flags: str) -> str:
    """What it prints."""
    done = subprocess.run(
        (sys.executable, "-m", "tests.bench.gpu_stack", "tiny", *FLAGS, *flags),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_the_bench_of_the_whole_stack(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    printed = bench("--out", str(out))
    [figures] = json.loads(out.read_text())["figures"]
    assert list(figures["starts"]) == ["cold", "warm", "engine"]
    for name, start in figures["starts"].items():
        assert sum(start["phases"].values()) <= start["seconds"]
        assert "starting PyTorch" in start["phases"]
        assert f"{name}: {start['seconds']:.1f} s to READY" in printed
    [row] = figures["rates"]
    assert row["streams"] == 2
    assert min(row["engine"], row["worker"], row["stack"]) > 0
    assert row["percent"] == 100 * row["stack"] / row["engine"]
    # Each as soon as it is known, the engine's first.
    told = [printed.index(f"{way}, 2 streams: {row[way]:.0f} tok/s") for way in ("engine", "worker", "stack")]
    assert told == sorted(told)


@pytest.mark.timeout(300)
def test_rates_alone_take_one_start(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    bench("--rates-only", "--out", str(out))
    [figures] = json.loads(out.read_text())["figures"]
    assert list(figures["starts"]) == ["warm"]
    assert figures["rates"][0]["stack"] > 0


def test_requests_that_do_not_end_are_an_error_that_says_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stack, "ROUND_SECONDS", 0.05)

    async def stuck(case: gpu_stack.Case, count: int, seen: Counter[str]) -> float:
        seen["tokens"] += count
        await asyncio.Event().wait()
        return 0.0

    case = gpu_stack.Case("tiny", "bf16", "cpu", (3,), 8, 6)
    with pytest.raises(TimeoutError, match=r"stack, 3 streams, warming up: no end .*; came: 3 tokens"):
        asyncio.run(gpu_stack.best("stack", case, 3, stuck))
