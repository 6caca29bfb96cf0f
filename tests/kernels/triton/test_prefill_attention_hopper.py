"""Attention that divides its labour, on a machine of threads and tensors, beside attention without pages."""

import pytest
import torch

from moebius_kernels.attention_plan import Span
from moebius_kernels.calls import shapes_of
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.registry import Query, TokenRange, refusal

pytest.importorskip("triton")
from moebius_kernels.triton import hopper_attention, prefill_attention_hopper
from tests.kernels.triton import arrivals
from tests.kernels.triton.device_world import DeviceWorld
from tests.kernels.triton.gluon_machine import Machine
from tests.kernels.triton.hopper_world import DEVICE, H200
from tests.without_interpreter import told

# Weights are rounded to bf16.
LIMIT = 0.02
# What the compiler is asked for, in `compiled_prefill.py`.
COMPILED = ("qwen3-moe", "gpt-oss")
# What a block may have of H100 and H200, CUDA programming guide, compute capability 9.0.
SHARED = 227 * 1024

pytestmark = pytest.mark.usefixtures("poisoned")


class World(DeviceWorld):
    paged_attention = staticmethod(hopper_attention.paged_attention)

    def __init__(self, heads=2, kv_heads=1, page_size=16, dim=64, num_pages=200):
        super().__init__(
            heads, kv_heads, page_size, key_dim=dim, value_dim=dim, num_pages=num_pages, dtype=torch.bfloat16
        )


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    if DEVICE.type == "cuda":
        return
    made = Machine(
        replaced={
            "_hidden": lambda scores, one, other: scores.masked_fill(one > other, float("-inf")),
            "pairs_of": lambda x: x.bfloat16(),
            "numbers_of": lambda pairs, layout: pairs,
        }
    )
    monkeypatch.setattr(prefill_attention_hopper, "launch", made.launch)
    monkeypatch.setattr(prefill_attention_hopper, "multiprocessors", made.multiprocessors)


# First pieces and pieces in the middle, of fewer rows than a group's, a tile's and more; and decodes.
PROMPTS = [[(0, 2), (0, 15), (40, 1), (0, 17)], [(0, 129), (130, 70), (7, 1)], [(390, 65)]]


@pytest.mark.parametrize("pieces", PROMPTS)
def test_prompts(pieces):
    World().check(pieces, tolerance=LIMIT)


@pytest.mark.parametrize("window", [1, 33, 100, 1000])
def test_sliding_window(window):
    World().check([(0, 140), (200, 30), (40, 1)], window=window, tolerance=LIMIT)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (4, 1, 128), (7, 1, 64), (8, 1, 64)])
def test_heads(heads, kv_heads, dim):
    World(heads, kv_heads, dim=dim).check([(0, 20), (50, 70)], tolerance=LIMIT)


@pytest.mark.parametrize("page_size", [8, 64, 256])
def test_pages(page_size):
    World(page_size=page_size, num_pages=60).check([(0, 20), (290, 70)], window=150, tolerance=LIMIT)


def test_scores():
    sinks = torch.tensor([-3.0, 8.0], device=DEVICE)
    World().check([(0, 20), (50, 70)], tolerance=LIMIT, scale=0.3, sinks=sinks)


def test_pages_that_no_row_sees_are_not_read():
    pieces = [(0, 20), (200, 70), (40, 1)]
    world = World()
    taken = world.free[-sum(-(-(start + length) // 16) for start, length in pieces) :]
    unused = sorted(set(range(200)) - set(taken))
    for rows in (world.pages.keys, world.pages.values):
        rows.numbers[unused] = float("nan")
    world.check(pieces, window=40, tolerance=LIMIT)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_faulty_query_stays_alone(fault):
    world = World()
    plan, *_ = world.run([(11, 80), (0, 6)])
    q = world.random(86, 2, 64)
    expected = hopper_attention.paged_attention(q, world.pages, plan)
    q[70, :, 3] = q[81, :, 3] = fault
    got = hopper_attention.paged_attention(q, world.pages, plan)
    assert got.isnan().all(-1).all(-1).nonzero().flatten().tolist() == [70, 81]
    kept = [row for row in range(86) if row not in (70, 81)]
    assert torch.equal(got[kept], expected[kept])


def test_queries_may_lie_beside_keys_and_values():
    world = World()
    plan, *_ = world.run([(11, 80)])
    q = world.random(80, 5, 64)[:, 1:3]
    got = hopper_attention.paged_attention(q, world.pages, plan)
    assert torch.equal(got, hopper_attention.paged_attention(q.contiguous(), world.pages, plan))


def reason(tokens=8192, softcap=None, **changed):
    sizes = {"heads": 32, "kv_heads": 4, "page": 16, "dim": 128, "value_dim": 128} | changed
    dtype, dim = sizes.get("dtype", torch.bfloat16), sizes["dim"]
    call = {
        "q": torch.empty(2, sizes["heads"], dim, dtype=dtype),
        "kv_pages": KvPages.allocate(
            sizes.get("format", KvFormat.MODEL), 1, sizes["page"], sizes["kv_heads"], dim, sizes["value_dim"],
            dtype, torch.device("cpu"), values_in_keys=sizes.get("in_keys", False),
        ),
        "plan": World().plan([Span(0, 2, (1,))]),
        "scale": None, "softcap": softcap, "sinks": None,
    }  # fmt: skip
    query = Query("paged_attention", shapes_of("paged_attention", call), TokenRange(1, tokens), H200)
    return str(refusal(hopper_attention.BACKENDS[0], query))


def test_what_is_admitted():
    assert reason() == reason(dim=64, value_dim=64) == reason(heads=28) == reason(page=8) == "None"
    assert "512 tokens" in reason(tokens=511)
    assert "float16" in reason(dtype=torch.float16)
    assert "kept as fp8" in reason(format=KvFormat.FP8)
    assert "kept as int8" in reason(format=KvFormat.INT8)
    assert "lie in the keys" in reason(in_keys=True)
    assert "keys of 256" in reason(dim=256, value_dim=256)
    assert "values of 64" in reason(value_dim=64)
    assert "pages of 12" in reason(page=12)
    assert "pages of 4" in reason(page=4)
    assert "multiples of 4" in reason(heads=30)
    assert "cap" in reason(softcap=30.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return told("tests.kernels.triton.compiled_prefill", *COMPILED, cache=tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("shape", COMPILED)
def test_what_the_compiler_makes_of_it(found, shape):
    """Numbers stay in registers, and products run while the program goes on: where the assembler cannot be
    sure of registers it waits for each by itself. A thread has 64 scores, whose exponentials do not wait."""
    one = found[shape]
    assert one["stack"] == 0
    assert one["shared"] <= SHARED
    assert one["instructions"] == one["products"] > 0
    assert one["waited"] == one["waits"]
    assert one["tiles"] > 0
    # Of each group, a step with masks and one without, at least.
    assert len(one["between"]) >= 4
    assert min(one["between"]) >= 64


@pytest.mark.parametrize("shape", COMPILED)
def test_groups_hand_shared_memory_over_in_order(found, shape):
    """racecheck cannot judge that (`tests/gpu/sanitize.py`). Keys are given back while a product reads on in
    the values."""
    order = arrivals.order(found[shape]["ptx"])
    assert arrivals.faults(order, 1) == []
    assert arrivals.states(order) == arrivals.IN_ORDER
