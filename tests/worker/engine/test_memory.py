"""The memory plan, and what it takes for the memory there is."""

import pytest

from moebius_worker.engine.memory import (
    GIB,
    GPU_SHARE,
    HOST_SHARE,
    Demand,
    KvShare,
    OutOfMemoryPlan,
    plan_memory,
)
from moebius_worker.host_memory import Memory, host_memory

MIB = 1 << 20


def demand(**changes):
    values = {
        "weights": GIB,
        "workspace": GIB // 2,
        "page_bytes": MIB,
        "page_size": 16,
        "context_len": 8192,
        "max_model_len": None,
        "kv_cache_bytes": None,
    }
    return Demand(**(values | changes))


def test_the_kv_cache_gets_its_share_of_the_rest():
    plan = plan_memory(demand(), Memory(4 * GIB, 16 * GIB), HOST_SHARE)
    assert plan.kv_cache == 5 * GIB // 8 == plan.num_pages * MIB
    assert plan.max_model_len == 8192


def test_the_share_of_a_host_has_a_limit_and_that_of_a_gpu_has_none():
    assert plan_memory(demand(), Memory(100 * GIB, 100 * GIB), HOST_SHARE).kv_cache == 2 * GIB
    assert plan_memory(demand(), Memory(101 * GIB + GIB // 2, 120 * GIB), GPU_SHARE).kv_cache == 90 * GIB


def test_a_size_that_was_asked_for_is_taken():
    plan = plan_memory(demand(kv_cache_bytes=100 * MIB + 5), Memory(4 * GIB, 4 * GIB), HOST_SHARE)
    assert (plan.num_pages, plan.kv_cache) == (100, 100 * MIB)
    # What fits nowhere cannot be served.
    assert plan.max_model_len == 1600


def test_a_length_that_was_asked_for_raises_the_share():
    plan = plan_memory(demand(max_model_len=8000), Memory(3 * GIB, 4 * GIB), HOST_SHARE)
    assert plan.num_pages == 500
    assert plan.max_model_len == 8000


@pytest.mark.parametrize(
    ("changes", "available", "permanent"),
    [
        ({}, GIB, False),
        ({}, 3 * GIB // 2, False),
        ({"weights": 20 * GIB}, 8 * GIB, True),
        ({"kv_cache_bytes": 7 * GIB}, 8 * GIB, False),
        ({"kv_cache_bytes": 15 * GIB}, 8 * GIB, True),
        ({"max_model_len": 8192 * 16}, 8 * GIB, False),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(changes, available, permanent):
    with pytest.raises(OutOfMemoryPlan) as refusal:
        plan_memory(demand(**changes), Memory(available, 16 * GIB), HOST_SHARE)
    assert refusal.value.permanent is permanent
    for number in (demand(**changes).weights, GIB // 2, available, 16 * GIB):
        assert f"{number / GIB:.2f} GiB" in str(refusal.value)


def test_a_cache_too_small_for_one_request_is_refused():
    with pytest.raises(OutOfMemoryPlan, match=r"does not hold one request of 1600 tokens") as refusal:
        plan_memory(
            demand(kv_cache_bytes=99 * MIB, max_model_len=1600), Memory(9 * GIB, 9 * GIB), KvShare(1, None)
        )
    assert refusal.value.permanent


class Machine:
    """A tree of files as the kernel shows them."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 800 kB\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_machine_without_control_groups(machine):
    assert host_memory(machine.root) == Memory(800 * 1024, 1000 * 1024)


def test_version_2_takes_the_tightest_group_on_the_way_up(machine):
    machine.write("proc/self/cgroup", "0::/pods/one\n")
    for path, limit, used, cached in (("pods/one", "max", 9, 0), ("pods", 500000, 300000, 100000)):
        machine.write(f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")
        machine.write(f"sys/fs/cgroup/{path}/memory.current", f"{used}\n")
        machine.write(f"sys/fs/cgroup/{path}/memory.stat", f"anon 5\ninactive_file {cached}\n")
    assert host_memory(machine.root) == Memory(300000, 500000)


def test_version_1(machine):
    machine.write("proc/self/cgroup", "9:cpu:/a\n4:memory:/a/b\n0::/\n")
    machine.write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "400000\n")
    machine.write("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "150000\n")
    machine.write("sys/fs/cgroup/memory/a/b/memory.stat", "cache 7\ntotal_inactive_file 50000\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "150000\n")
    machine.write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n")
    assert host_memory(machine.root) == Memory(300000, 400000)


def test_a_container_that_sees_its_group_at_the_top_of_the_mount(machine):
    machine.write("proc/self/cgroup", "0::/kubepods/not-mounted-here\n")
    machine.write("sys/fs/cgroup/memory.max", "200000\n")
    machine.write("sys/fs/cgroup/memory.current", "250000\n")
    machine.write("sys/fs/cgroup/memory.stat", "inactive_file 10\n")
    assert host_memory(machine.root) == Memory(0, 200000)


def test_this_machine():
    memory = host_memory()
    assert 0 < memory.available <= memory.total
