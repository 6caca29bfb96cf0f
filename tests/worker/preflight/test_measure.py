"""The caches of a GPU are sized by what the largest steps were seen to take."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from moebius_kernels.kv_pages import KvPages
from moebius_kernels.operations import REFERENCE, Operations
from moebius_kernels.plan import Choice, Plan, token_ranges
from moebius_kernels.registry import TokenRange
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.memory import OutOfMemoryPlan, plan_table
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.runner import Computed, ModelRunner, PlannedModel, RunnerOptions
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.types import Sampled, SampleRow, Slice
from moebius_worker.host_memory import Memory
from moebius_worker.preflight import measure
from moebius_worker.preflight.measure import CudaMemory, make_runner, refusing_plainly, size_caches
from moebius_worker.preflight.prepare import Prepared
from moebius_worker.preflight.run import PreflightMemoryError
from moebius_worker.preflight.subject import steps_for
from tests.tiny import VOCAB_SIZE, write_checkpoint
from tests.worker.engine.engine_world import write_model

MIB = 1 << 20
STEP, RUNNING, LONGEST, PAGE = 64, 4, 2048, 4


class FakeMemory:
    """Of `free` bytes. When `most` is asked, `took` and the caches of the runner that is there are gone; a
    graph takes `each` bytes outside of the allocator when it is launched first."""

    def __init__(self, free: int, took: int, seen: "Seen", each: int = 0) -> None:
        self.free, self._took, self._seen, self._each = free, took, seen, each
        self.settled = 0

    def settle(self) -> Memory:
        self.settled += 1
        return Memory(self.free, 2 * self.free)

    def outside(self) -> int:
        launched = bool(self._seen.captured) and len(self._seen.steps) > 1
        return 5 * MIB + self._each * launched

    def most(self) -> int:
        return self.free + self._took + self._seen.cache_bytes[-1]


class Seen:
    """Runners that were made, what they captured, and slices that they computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: WeakSet[ModelRunner] = WeakSet()
        self.cache_bytes: list[int] = []
        self.captured: list[list[int]] = []
        self.steps: list[Sequence[Slice]] = []
        self.sampled: list[int] = []
        step, init = ModelRunner.step, ModelRunner.__init__

        def made(runner: ModelRunner, *args, **kwargs) -> None:
            init(runner, *args, **kwargs)
            self.alive.add(runner)
            pages = [cache.tensors for cache in runner._caches if isinstance(cache.tensors, KvPages)]
            self.cache_bytes.append(sum(2 * one.keys.numbers.nbytes for one in pages))

        def stepped(runner: ModelRunner, slices: Sequence[Slice]) -> Computed:
            self.steps.append(slices)
            return step(runner, slices)

        def capture(runner: ModelRunner, captured: Callable[[int], bool], progress: object) -> None:
            self.captured.append([size for size in range(1, 99) if captured(size)])

        def sampled(logits: torch.Tensor, rows: Sequence[SampleRow], **kwargs) -> list[Sampled]:
            found = sample(logits, rows, **kwargs)
            self.sampled.append(len(found))
            return found

        monkeypatch.setattr(measure, "sample", sampled)
        monkeypatch.setattr(ModelRunner, "__init__", made)
        monkeypatch.setattr(ModelRunner, "step", stepped)
        monkeypatch.setattr(ModelRunner, "capture", capture)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def _planned(model: Path, **options) -> PlannedModel:
    options = {"max_step_tokens": STEP, "max_running": RUNNING, "page_size": PAGE, "threads": 1} | options
    planned = PlannedModel.of(open_checkpoint(str(model)), RunnerOptions(device="cpu", **options))
    planned.read(lambda *_: None)
    return planned


def _kernels() -> Prepared:
    steps = steps_for(token_ranges(STEP), max_running=RUNNING, max_step_tokens=STEP)
    return Prepared(Plan(), REFERENCE, (), steps)


def _size(planned: PlannedModel, memory: FakeMemory, graphs: bool = False) -> None:
    size_caches(planned, _kernels(), memory, lambda *_: None, graphs=graphs)


def test_the_caches_are_sized_by_what_the_steps_took(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, seen = _planned(model), Seen(monkeypatch)
    memory = FakeMemory(100 * MIB, 40 * MIB, seen)
    _size(planned, memory)
    assert planned.plan.demand.workspace == 40 * MIB
    # Nine tenths of what is left beside weights, which are there already, and steps.
    page = planned.plan.demand.page_bytes
    assert planned.plan.num_pages == int(60 * MIB * 0.9) // page
    assert planned.plan.available == 100 * MIB + planned.plan.demand.weights
    assert "measured" in plan_table(planned.plan)
    assert memory.settled == 2
    # As small as a chunk allows.
    assert seen.cache_bytes == [(STEP // PAGE + 2) * page]
    # What it was measured with is gone, though nobody looked for cycles, which takes half a second.
    assert not seen.alive
    assert ModelRunner.of(planned).layout == planned.plan.layout


def test_more_that_steps_take_leaves_less(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, pages = Seen(monkeypatch), []
    for took in (10 * MIB, 50 * MIB):
        planned = _planned(model)
        _size(planned, FakeMemory(100 * MIB, took, seen))
        pages.append(planned.plan.num_pages)
    # A page more or less.
    assert pages[0] - pages[1] == pytest.approx(40 * MIB * 0.9 / planned.plan.demand.page_bytes, abs=1)


def test_memory_that_others_gave_back_meanwhile_makes_no_workspace_negative(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seen = _planned(model), Seen(monkeypatch)
    _size(planned, FakeMemory(100 * MIB, -30 * MIB, seen))
    assert planned.plan.demand.workspace == 0


def test_the_steps_are_all_decodes_and_a_chunk_that_looks_back_at_the_longest_text(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seen = _planned(model), Seen(monkeypatch)
    _size(planned, FakeMemory(100 * MIB, 0, seen))
    decodes, [chunk] = seen.steps
    assert [len(piece.token_ids) for piece in decodes] == [1] * RUNNING
    assert (chunk.start, chunk.end) == (LONGEST - STEP, LONGEST)
    # Their logits are what is sampled.
    assert seen.sampled == [RUNNING, 1]


def test_a_step_has_no_more_decodes_than_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, seen = _planned(model, max_running=STEP + 32), Seen(monkeypatch)
    _size(planned, FakeMemory(1000 * MIB, 0, seen), graphs=True)
    assert seen.captured == [[STEP]]
    assert seen.sampled == [STEP, STEP, 1]


def test_a_text_that_may_be_no_longer_bounds_the_chunk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, seen = _planned(model, max_model_len=48), Seen(monkeypatch)
    _size(planned, FakeMemory(100 * MIB, 0, seen))
    [chunk] = seen.steps[-1]
    assert (chunk.start, chunk.end) == (0, 48)


def test_caches_that_were_asked_for_bound_the_chunk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _planned(model).plan.demand.page_bytes
    planned, seen = _planned(model, kv_cache_bytes=8 * page), Seen(monkeypatch)
    _size(planned, FakeMemory(100 * MIB, 0, seen))
    assert seen.cache_bytes == [8 * page]
    [chunk] = seen.steps[-1]
    assert chunk.end - chunk.start == 6 * PAGE
    assert planned.plan.num_pages == 8


def test_the_largest_graph_is_captured_and_what_the_others_add_is_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seen = _planned(model), Seen(monkeypatch)
    _size(planned, FakeMemory(100 * MIB, 7 * MIB, seen, each=MIB), graphs=True)
    assert seen.captured == [[RUNNING]]
    # Graphs of 1, 2 and 3 rows: the driver's memory of each, and their logits.
    assert planned.plan.demand.workspace == (7 + 3) * MIB + (1 + 2 + 3) * VOCAB_SIZE * 4
    # Once before, so that the graph is not charged with what its kernels load.
    assert [len(slices) for slices in seen.steps] == [RUNNING, RUNNING, 1]


def test_numbers_that_are_not_finite_hide_no_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few layers of a model compute nonsense, whose sampling takes memory nevertheless."""
    planned, step = _planned(model), ModelRunner.step

    def broken(runner: ModelRunner, slices: Sequence[Slice]) -> Computed:
        computed = step(runner, slices)
        return computed._replace(logits=torch.full_like(computed.logits, torch.nan))

    monkeypatch.setattr(ModelRunner, "step", broken)
    seen = Seen(monkeypatch)
    _size(planned, FakeMemory(100 * MIB, 0, seen))
    assert seen.sampled == [RUNNING, 1]


@pytest.mark.parametrize(
    ("kind", "sizes", "running", "tokens"),
    [
        ("states", {"state_slots": 3}, 3, 128),
        ("window", {"num_window_pages": 12}, 11, 10 * PAGE),
        ("window", {"num_pages": 9}, 8, 7 * PAGE),
    ],
)
def test_caches_too_small_for_the_largest_steps_have_smaller_ones(
    kind: str,
    sizes: dict[str, int],
    running: int,
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = _planned(write_model(tmp_path, kind), max_running=16, max_step_tokens=128)
    planned.plan = replace(planned.plan, layout=replace(planned.plan.layout, **sizes))
    seen = Seen(monkeypatch)
    _size(planned, FakeMemory(1000 * MIB, 0, seen))
    decodes, [chunk] = seen.steps
    assert len(decodes) == running
    assert chunk.end - chunk.start == tokens


@pytest.mark.parametrize("kind", ["window", "states"])
def test_windows_and_states_have_room_for_the_steps_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seen = _planned(write_model(tmp_path, kind)), Seen(monkeypatch)
    layout = planned.plan.layout
    assert layout.num_window_pages if kind == "window" else layout.state_slots
    _size(planned, FakeMemory(1000 * MIB, 0, seen))
    assert [len(slices) for slices in seen.steps] == [RUNNING, 1]


def test_steps_that_leave_no_room_for_a_cache_are_refused_with_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seen = _planned(model), Seen(monkeypatch)
    with pytest.raises(OutOfMemoryPlan, match=r"workspace 0\.10 GiB"):
        _size(planned, FakeMemory(100 * MIB, 100 * MIB, seen))


def test_no_estimate_refuses_what_is_going_to_be_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU with room for the weights and a page or two."""
    weights = _planned(model).plan.demand.weights
    on_cpu = Place(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(
        "moebius_worker.engine.runner.build_model", lambda config, place: build_model(config, on_cpu)
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (weights + MIB // 2, 2 * weights))
    checkpoint, options = open_checkpoint(str(model)), RunnerOptions(device="cuda", dtype="float32")
    with pytest.raises(OutOfMemoryPlan, match="workspace"):
        PlannedModel.of(checkpoint, options)
    assert PlannedModel.of(checkpoint, options, estimated=False).plan.demand.workspace == 0


def _hidden() -> RuntimeError:
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = RuntimeError("the kernel _decode could not be launched")
    error.__context__.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        PreflightMemoryError("CUDA out of memory."),
        _hidden(),
    ],
)
def test_a_device_that_is_out_of_memory_meanwhile_is_a_refusal(
    error: Exception, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = _planned(model)
    planned.memory = Memory(3 << 30, 4 << 30)

    def step(*_: object) -> Computed:
        raise error

    monkeypatch.setattr(ModelRunner, "step", step)
    said = rf"3\.00 GiB of 4\.00 GiB .* up to {STEP} tokens .*--max-step-tokens.* The device said: "
    with pytest.raises(OutOfMemoryPlan, match=said) as refusal, refusing_plainly(planned):
        _size(planned, FakeMemory(100 * MIB, 0, Seen(monkeypatch)))
    assert not refusal.value.permanent


def test_memory_that_somebody_took_after_the_measuring_is_a_refusal_with_the_plan(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, seen = _planned(model), Seen(monkeypatch)
    _size(planned, FakeMemory(2 << 30, 512 * MIB, seen))
    with (
        pytest.raises(OutOfMemoryPlan, match=r"workspace 0\.50 GiB \+ KV cache 1\.35 GiB"),
        refusing_plainly(planned),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


# MiB of 100 GiB that were available at first, and that are outside of PyTorch now.
NOBODY = (101_000, 1_900)
SOMEBODY = [(100_000, 1_900), (101_000, 2_100), (90_000, 20_000)]


@pytest.mark.parametrize(("at_first", "outside"), [NOBODY, *SOMEBODY])
@pytest.mark.parametrize(
    ("error", "certain"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        # What the memory plan says of itself.
        (OutOfMemoryPlan("It does not fit.", permanent=True), True),
        (OutOfMemoryPlan("It does not fit.", permanent=False), False),
    ],
)
def test_a_refusal_is_permanent_where_nobody_else_has_memory(
    at_first: int, outside: int, error: Exception, certain: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come again with the next engine, and with that after it."""
    planned, device = _planned(model), FakeDevice(monkeypatch)
    device.total, device.outside = 102_400, outside
    planned.place = Place(torch.device("cuda"), torch.float32)
    planned.memory = Memory(at_first * MIB, device.total * MIB)
    with pytest.raises(OutOfMemoryPlan) as refusal, refusing_plainly(planned):
        raise error
    assert refusal.value.permanent is (certain and (at_first, outside) == NOBODY)


@pytest.mark.parametrize("asks", [False, True])
def test_graphs_are_not_counted_where_a_step_asks_the_host(
    asks: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EnoughError(Exception):
        pass

    def counted(*_: object, graphs: bool) -> None:
        assert graphs is not asks

    class Runner:
        def bind(self, operations: Operations) -> None:
            pass

        def capture(self, *_: object) -> None:
            """Says why there are none."""
            raise EnoughError

    planned = _planned(model)
    planned.place = Place(torch.device("cuda"), torch.float32)
    monkeypatch.setattr(type(planned.model), "ASKS_HOST", asks)
    monkeypatch.setattr(measure, "size_caches", counted)
    monkeypatch.setattr(ModelRunner, "of", lambda planned: Runner())
    choice = Choice("linear", "layers", TokenRange(1, 8), "triton", True, ())
    with pytest.raises(EnoughError):
        make_runner(planned, replace(_kernels(), plan=Plan((choice,))), lambda *_: None, graphs=True)


def test_other_errors_are_not_taken_for_that(model: Path) -> None:
    with pytest.raises(RuntimeError, match="illegal"), refusing_plainly(_planned(model)):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeDevice:
    """The readings of `torch.cuda`, in MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.reserved, self.peak, self.outside = 1000, 300, 500, 50
        readings = {
            "synchronize": lambda _: None,
            "empty_cache": self._empty,
            "reset_peak_memory_stats": self._reset,
            "memory_reserved": lambda _: self.reserved * MIB,
            "max_memory_reserved": lambda _: self.peak * MIB,
            "mem_get_info": lambda _: (
                (self.total - self.reserved - self.outside) * MIB,
                self.total * MIB,
            ),
        }
        for name, reading in readings.items():
            monkeypatch.setattr(torch.cuda, name, reading)

    def _empty(self) -> None:
        self.reserved = 200

    def _reset(self, _: object) -> None:
        self.peak = self.reserved


def test_what_a_gpu_gave_is_the_allocators_peak_and_what_is_outside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch)
    memory = CudaMemory(torch.device("cuda"))
    # Weights of 200, and 50 of others.
    assert memory.settle() == Memory(750 * MIB, 1000 * MIB)
    assert memory.outside() == 50 * MIB
    assert memory.most() == 250 * MIB
    # Some of the peak has been given back, and kernels were loaded.
    device.reserved, device.peak, device.outside = 350, 600, 80
    assert memory.outside() == 80 * MIB
    assert memory.most() == 680 * MIB
