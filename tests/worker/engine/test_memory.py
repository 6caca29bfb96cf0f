"""The memory plan, and what it takes for the memory there is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.memory import (
    GIB,
    GPU_SHARE,
    HOST_SHARE,
    Demand,
    KvShare,
    OutOfMemoryPlan,
    check_host,
    plan_memory,
    plan_table,
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


@pytest.mark.parametrize(("nbytes", "permanent"), [(3 * GIB, False), (9 * GIB, True)])
def test_tables_beside_a_gpu_must_fit_into_the_host(nbytes, permanent):
    check_host(2 * GIB, Memory(2 * GIB, 8 * GIB))
    with pytest.raises(OutOfMemoryPlan, match=f"{nbytes / GIB:.2f} GiB") as refusal:
        check_host(nbytes, Memory(2 * GIB, 8 * GIB))
    assert refusal.value.permanent is permanent


def test_a_cache_too_small_for_one_request_is_refused():
    with pytest.raises(OutOfMemoryPlan, match=r"does not hold one request of 1600 tokens") as refusal:
        plan_memory(
            demand(kv_cache_bytes=99 * MIB, max_model_len=1600), Memory(9 * GIB, 9 * GIB), KvShare(1, None)
        )
    assert refusal.value.permanent
    with pytest.raises(OutOfMemoryPlan, match=r"of 1\.00 KiB .* needs 0*[1-9][0-9.]* MiB"):
        plan_memory(demand(kv_cache_bytes=1024), Memory(9 * GIB, 9 * GIB), KvShare(1, None))


# ---- models with several kinds of layers -----------------------------------------------------------

# As gpt-oss has them: half of the layers look back 128 tokens.
WINDOWED = {"window": 128, "window_page_bytes": MIB, "max_running": 32, "max_step_tokens": 4096}
# Three of four layers carry a state of 60 MiB along.
STATEFUL = {"state_slot_bytes": 60 * MIB, "max_running": 32, "max_step_tokens": 4096}


def test_window_pages_for_all_that_run_and_as_many_that_are_kept():
    plan = plan_memory(demand(**WINDOWED), Memory(101 * GIB + GIB // 2, 120 * GIB), GPU_SHARE)
    # 128 tokens lie in 9 pages at most, and one more for a chunk's end.
    assert plan.layout == CacheLayout(16, 90 * 1024 - (2 * 32 * 10 + 256), 128, 2 * 32 * 10 + 256)
    assert plan.kv_cache == 90 * GIB


def test_window_pages_have_a_third_at_most():
    plan = plan_memory(demand(**WINDOWED), Memory(2 * GIB, 4 * GIB), HOST_SHARE)
    assert plan.kv_cache == GIB // 8
    # Of 128 pages one request needs 1 and 11; of the others a third.
    assert plan.layout.num_window_pages == 11 + (128 - 12) // 3
    assert plan.layout.num_pages == 128 - plan.layout.num_window_pages


def test_the_least_window_pages_are_enough_for_chunks_of_a_page():
    wish = demand(**WINDOWED, kv_cache_bytes=12 * MIB)
    layout = plan_memory(wish, Memory(4 * GIB, 4 * GIB), GPU_SHARE).layout
    assert (layout.num_pages, layout.num_window_pages) == (1, 11)
    wish = demand(**WINDOWED, kv_cache_bytes=(512 + 11) * MIB, max_model_len=8192)
    layout = plan_memory(wish, Memory(4 * GIB, 4 * GIB), GPU_SHARE).layout
    assert SchedulerConfig(layout, 32, 4096, 8192, 0).step_tokens == 16
    with pytest.raises(OutOfMemoryPlan):
        plan_memory(demand(**WINDOWED, kv_cache_bytes=11 * MIB), Memory(4 * GIB, 4 * GIB), GPU_SHARE)


def test_state_slots_for_all_that_run_and_two_snapshots_each():
    plan = plan_memory(demand(**STATEFUL), Memory(50 * GIB, 120 * GIB), GPU_SHARE)
    assert plan.layout.state_slots == 96
    assert plan.kv_cache <= int(48.5 * GIB * 0.9) < plan.kv_cache + MIB


def test_few_state_slots_where_memory_is_short():
    plan = plan_memory(demand(**STATEFUL), Memory(4 * GIB, 16 * GIB), HOST_SHARE)
    assert plan.layout.state_slots == 1 + (640 - 61) // 3 // 60


def test_a_model_whose_layers_all_have_windows_has_pages_for_nothing():
    plan = plan_memory(demand(**WINDOWED, page_bytes=0), Memory(8 * GIB, 8 * GIB), GPU_SHARE)
    assert plan.layout.num_pages == 32 * 8192 // 16
    assert plan.kv_cache == plan.layout.num_window_pages * MIB
    assert plan.max_model_len == 8192


def test_the_refusal_counts_all_pools():
    with pytest.raises(OutOfMemoryPlan, match=r"KV cache 0\.56 GiB") as refusal:
        plan_memory(demand(**STATEFUL, max_model_len=8192), Memory(2 * GIB, 3 * GIB), HOST_SHARE)
    assert not refusal.value.permanent


def test_the_table_names_everything_and_its_lines_add_up():
    plan = plan_memory(demand(**WINDOWED, state_slot_bytes=60 * MIB), Memory(8 * GIB, 16 * GIB), GPU_SHARE)
    lines = [line.rsplit(maxsplit=3) for line in plan_table(plan).splitlines()]
    assert [name.split("  ")[0] for name, *_ in lines] == [
        "weights",
        "workspace",
        "pages of 16 tokens",
        "pages of a window of 128",
        "state slots",
        "left",
        "available",
    ]
    sizes = [float(number) * {"GiB": 1024, "MiB": 1}[unit] for _, number, unit, _ in lines]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=30)
    assert sum(float(share.rstrip("%")) for *_, share in lines[:-1]) == pytest.approx(100, abs=0.5)
    # No lines for what the model has not.
    assert len(plan_table(plan_memory(demand(), Memory(8 * GIB, 8 * GIB), GPU_SHARE)).splitlines()) == 5


@settings(max_examples=3000, deadline=None)
@given(
    available=st.integers(0, 200 * GIB),
    others=st.integers(0, 50 * GIB),
    share=st.sampled_from([GPU_SHARE, HOST_SHARE, KvShare(1.0, None)]),
    weights=st.integers(0, 100 * GIB),
    workspace=st.integers(0, 5 * GIB),
    page_bytes=st.sampled_from([0, 1, 4096, MIB, 300 * MIB]),
    page_size=st.sampled_from([1, 16, 64, 128]),
    context_len=st.integers(1, 1 << 20),
    asked_len=st.none() | st.integers(1, 1 << 20),
    kv_cache_bytes=st.none() | st.integers(1, 50 * GIB),
    window=st.none() | st.integers(1, 5000),
    window_page_bytes=st.integers(1, 20 * MIB),
    state_slot_bytes=st.sampled_from([0, 0, 1000, 63 * MIB]),
    max_running=st.integers(1, 600),
    max_step_tokens=st.integers(1, 16_384),
)
def test_any_plan_fits_and_serves_or_is_refused(available, others, share, asked_len, **values):
    if values["window"] is None:
        values["window_page_bytes"] = 0
        values["page_bytes"] = max(1, values["page_bytes"])
    wish = demand(**values, max_model_len=asked_len and min(asked_len, values["context_len"]))
    memory = Memory(available, available + others)
    # One request of the length that was asked for, with the pages that it holds at a time.
    length = wish.max_model_len or wish.page_size
    window_pages = 0 if wish.window is None else -(-wish.window // wish.page_size) + 1
    one = (
        -(-length // wish.page_size) * wish.page_bytes
        + window_pages * wish.window_page_bytes
        + wish.state_slot_bytes
    )
    try:
        plan = plan_memory(wish, memory, share)
    except OutOfMemoryPlan:
        # Two pages more, for a chunk: it is never refused where it would fit with ease.
        room = available - wish.weights - wish.workspace
        allowed = room if wish.kv_cache_bytes is None else min(room, wish.kv_cache_bytes)
        assert allowed < max(one + 2 * wish.window_page_bytes, 1) or (wish.kv_cache_bytes or 0) > room
        return
    layout = plan.layout
    assert plan.kv_cache >= one
    assert wish.weights + wish.workspace + plan.kv_cache <= available
    assert wish.kv_cache_bytes is None or plan.kv_cache <= wish.kv_cache_bytes
    assert 1 <= plan.max_model_len <= max(layout.pool_tokens, 1)
    assert plan.max_model_len <= wish.context_len
    assert plan.max_model_len == (wish.max_model_len or plan.max_model_len)
    assert (layout.state_slots > 0) == (wish.state_slot_bytes > 0)
    # What the scheduler makes of it: at least one request runs, and gets on.
    config = SchedulerConfig(layout, wish.max_running, wish.max_step_tokens, plan.max_model_len, 0)
    assert 1 <= config.places <= wish.max_running
    assert config.places <= config.step_tokens <= wish.max_step_tokens
    assert config.step_tokens >= min(wish.max_step_tokens, wish.page_size)
    assert all(float(line.split()[-1].rstrip("%")) >= 0 for line in plan_table(plan).splitlines())


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
