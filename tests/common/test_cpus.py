"""CPUs, as the control groups of a machine that is a tree of files limit them."""

import os
from pathlib import Path

import pytest

from moebius_common.cpus import cpu_count


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_control_groups(tmp_path: Path) -> None:
    assert cpu_count(tmp_path) == 8


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max", 8), ("200000", 2), ("150000", 2), ("10000", 1), ("2000000", 8)]
)
def test_version_2(tmp_path: Path, quota: str, cpus: int) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pods/one\n")
    write(tmp_path / "sys/fs/cgroup/pods/one/cpu.max", f"{quota} 100000\n")
    assert cpu_count(tmp_path) == cpus


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pods/one\n")
    write(tmp_path / "sys/fs/cgroup/pods/one/cpu.max", "max 100000\n")
    write(tmp_path / "sys/fs/cgroup/pods/cpu.max", "300000 100000\n")
    assert cpu_count(tmp_path) == 3


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 8), ("120000", 3)])
def test_version_1(tmp_path: Path, quota: str, cpus: int) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/not/mounted/here\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", f"{quota}\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "50000\n")
    assert cpu_count(tmp_path) == cpus
