"""What the compiler makes of the products that divide their labour, for sm_90, without a GPU."""

import re

import pytest

from tests.kernels.triton import arrivals
from tests.without_interpreter import told

pytest.importorskip("triton")

# Rows come in the experts' order.
IN_ORDER = ("up fp8_block", "down fp8_block")
OTHERS = (
    "up bf16",
    "down bf16",
    "up nvfp4_words",
    "down mxfp4_words",
    "up q4_k",
    "up int4_zero_words",
    "down int4_words",
)
NAMES = (*OTHERS, *IN_ORDER)
# What a block may have of H100 and H200, CUDA programming guide, compute capability 9.0.
_SHARED = 227 * 1024


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return told("tests.kernels.triton.compiled_hopper", *NAMES, cache=tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_stay_in_registers(found, name):
    """A group of warps has 128 sums a thread, and beside them what it multiplies."""
    assert found[name]["stack"] == 0
    assert found[name]["shared"] <= _SHARED


@pytest.mark.parametrize("name", NAMES)
def test_products_run_while_the_program_goes_on(found, name):
    """Where the assembler cannot be sure of registers, it waits for each product by itself."""
    one = found[name]
    assert one["instructions"] == one["products"] > 0
    assert one["waited"] == one["waits"]


@pytest.mark.parametrize("name", OTHERS)
def test_tiles_are_fetched_by_the_copy_engine_and_tokens_gathered(found, name):
    assert found[name]["tiles"] >= 2
    assert (found[name]["gathers"] > 0) is name.startswith("up")


@pytest.mark.parametrize("name", NAMES)
def test_groups_hand_shared_memory_over_in_order(found, name):
    """racecheck cannot judge that (`tests/gpu/sanitize.py`). Of bf16 a product may read on while the stage of
    the one before it is given back."""
    order = arrivals.order(found[name]["ptx"])
    assert arrivals.faults(order, name.endswith("bf16")) == []
    assert arrivals.states(order) == arrivals.IN_ORDER


# What is put for what in the text of a program, and what is said then.
CHANGES = {
    "no barrier": (r"bar\.sync[^;]*;", "", "after wgmma.wait_group"),
    "of fewer": (r"(bar\.sync\s+2), 128", r"\1, 64", "groups and their barriers"),
    "of another group": (r"bar\.sync\s+2,", "bar.sync 0,", "groups and their barriers"),
    "a read behind it": (
        r"(@%p\d+ mbarrier\.arrive\.sh)",
        r"ld.shared.b32 %r1, [%r2];\n\1",
        "after ld.shared",
    ),
    "a product": (r"(@%p\d+ mbarrier\.arrive\.sh)", r"wgmma.mma_async.x;\n\1", "after wgmma.mma_async"),
    "not waited for": (r"(wait_group\.sync\.aligned) 1", r"\1 2", "with 2 products under way"),
    "a wait of one": ("mbarrier.try_wait", "@%p1 mbarrier.try_wait", "by some threads alone"),
    "a copy of one": (r"cp\.async\.mbarrier", "@%p1 cp.async.mbarrier", "by some threads alone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_out_of_order_is_seen(found, change):
    pattern, put, said = CHANGES[change]
    changed, times = re.subn(pattern, put, found["up bf16"]["ptx"])
    assert times
    assert said in str(arrivals.faults(arrivals.order(changed), 1))


@pytest.mark.parametrize("which", range(2))
def test_a_barrier_of_all_that_is_missing_is_seen(found, which):
    """The first group's, in front of its own work."""
    parts = found["up bf16"]["ptx"].split("barrier.sync")
    changed = "barrier.sync".join(parts[: which + 1]) + "//" + "barrier.sync".join(parts[which + 1 :])
    assert arrivals.states(arrivals.order(changed)) != arrivals.IN_ORDER
