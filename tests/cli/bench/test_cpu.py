"""The load generator's own share of a core."""

from types import SimpleNamespace

import pytest

from moebius_cli.bench import cpu
from moebius_cli.bench.cpu import CpuShare


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        monkeypatch.setattr(
            cpu, "time", SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.used)
        )

    def run(self, share: CpuShare, seconds: float, used: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.used += used / seconds / 4
            share.sample()


def test_the_busiest_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    share = CpuShare()
    clocks.run(share, 2, 0.4)
    clocks.run(share, 1, 0.9)
    clocks.run(share, 20, 1)
    assert share.finish() == pytest.approx(0.9)


def test_a_short_run_counts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    share = CpuShare()
    clocks.run(share, 0.5, 0.4)
    assert share.finish() == pytest.approx(0.8)
