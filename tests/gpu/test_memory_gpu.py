"""The memory plan on a real GPU: what was measured is enough for the worst steps, and caches get the rest.

The plan takes all of a GPU: these tests are run with nobody beside them.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius_kernels.kv_pages import KvPages
from moebius_kernels.plan import Choice, Plan, token_ranges
from moebius_kernels.registry import TokenRange
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.memory import OutOfMemoryPlan, plan_table
from moebius_worker.engine.runner import ModelRunner, PlannedModel, RunnerOptions
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.types import SampleRow, SamplingParams
from moebius_worker.preflight import measure
from moebius_worker.preflight.prepare import Prepared
from moebius_worker.preflight.subject import ProbeStep, steps_for
from moebius_worker.preflight.workload import Workload
from tests.bench.gpu_engine import MODELS, shortened
from tests.gpu.test_engine_gpu import triton

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="wants the GPU for itself"),
    pytest.mark.timeout(200),
]

MIB, GIB = 1 << 20, 1 << 30
RUNNING, STEP, LONGEST = 64, 2048, 16384
# Graphs of fewer rows would take long to compile here.
FEWEST = 40
# The driver gives memory in parts of 2 MiB, and each layer's keys and values are two.
GRAIN = 64 * MIB

# Leaves so many bytes of the GPU to others as each line says; all that there are, of its own none.
GREEDY = """
import sys, torch
for line in sys.stdin:
    held = None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - int(line)), dtype=torch.uint8, device="cuda")
    print(flush=True)
"""
ALL = 1 << 60


class Greedy:
    """Another process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def leave(self, nbytes: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(nbytes, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "\n", "it has ended"


@pytest.fixture(scope="module", autouse=True)
def other() -> Iterator[Greedy]:
    """It takes nothing before it is told to, but seconds to start."""
    greedy = Greedy()
    yield greedy
    greedy.process.kill()
    greedy.process.communicate()


@pytest.fixture
def greedy(other: Greedy) -> Iterator[Greedy]:
    yield other
    other.leave(ALL)


@pytest.fixture
def planned(tmp_path: Path) -> PlannedModel:
    """Four layers of true sizes."""
    (tmp_path / "config.json").write_text(json.dumps(shortened(MODELS["qwen3-30b"], 4)))
    free_all()
    options = RunnerOptions(
        device="cuda",
        dummy_weights="nvfp4",
        max_running=RUNNING,
        max_step_tokens=STEP,
        max_model_len=LONGEST,
    )
    return PlannedModel.of(open_checkpoint(str(tmp_path)), options, estimated=False)


def runners() -> list[ModelRunner]:
    return [one for one in gc.get_objects() if type(one) is ModelRunner]


def free_all() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def kernels() -> Prepared:
    """Our own, which are captured from FEWEST rows on; of the steps the largest."""
    few = Choice("linear", "", TokenRange(1, FEWEST - 1), "triton", False, ())
    steps = steps_for(token_ranges(STEP, RUNNING), max_running=RUNNING, max_step_tokens=STEP)
    largest = tuple({step.kind: step for step in steps}.values())
    return Prepared(Plan((few,)), triton(), (), largest)


def ready(planned: PlannedModel) -> ModelRunner:
    return measure.make_runner(planned, kernels(), lambda *_: None, graphs=True)


def meanwhile(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], Any], *, after: bool) -> None:
    """Has `act` done before or after a function of `measure`."""
    function = getattr(measure, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        if not after:
            act()
        result = function(*args, **kwargs)
        if after:
            act()
        return result

    monkeypatch.setattr(measure, name, both)


def cache_bytes(runner: ModelRunner) -> int:
    found = 0
    for cache in runner._caches:
        assert isinstance(cache.tensors, KvPages)
        assert cache.tensors.values is not None
        found += cache.tensors.keys.numbers.nbytes + cache.tensors.values.numbers.nbytes
    return found


def worst_steps(runner: ModelRunner) -> Iterator[ProbeStep]:
    """Each, when it has been computed, with all layers: graphs, a chunk of the longest text, both kinds."""
    steps = [ProbeStep("decode", count) for count in range(RUNNING, FEWEST - 1, -8)]
    steps += [ProbeStep("prefill", STEP), ProbeStep("mixed", STEP)]
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, logprobs=20)
    draw_tokens = triton().draw_tokens
    for step in steps:
        longest = step.kind != "decode"
        workload = Workload(runner.layout, runner.vocab_size, runner.max_model_len, longest=longest)
        slices = workload.slices(step)
        assert runner.captured(slices) != longest
        rows = [SampleRow(params, piece.token_ids[:9], piece.token_ids[:2]) for piece in slices]
        sample(runner.step(slices).logits, rows, draw_tokens=draw_tokens)
        yield step


def test_the_worst_steps_stay_within_the_plan(planned: PlannedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = measure.CudaMemory(planned.place.device)
    begun, held = memory.settle(), torch.cuda.memory_allocated()
    left: list[ModelRunner] = []
    meanwhile(monkeypatch, "size_caches", lambda: left.extend(runners()), after=True)
    runner = ready(planned)
    # What it was measured with is gone, though nobody looked for cycles.
    assert not left
    plan = planned.plan
    demand, caches = plan.demand, plan.kv_cache
    whole = demand.weights + demand.workspace + caches
    print("\n" + plan_table(plan))
    assert demand.measured
    assert whole <= begun.available
    # As large as promised: nine tenths of what the others leave, but for a part of a page.
    assert cache_bytes(runner) == caches
    rest = plan.available - demand.weights - demand.workspace
    assert 0 <= int(0.9 * rest) - caches < demand.page_bytes

    # What was in use with the weights alone.
    before = begun.total - (plan.available - demand.weights)
    for step in worst_steps(runner):
        allocated = torch.cuda.max_memory_allocated() - held
        # With kernels, graphs, and what is left over in PyTorch's segments.
        taken = memory.most() - before - caches
        print(f"{step}: allocated {allocated >> 20} of {whole >> 20} MiB, workspace {taken >> 20}")
        assert allocated <= whole
        assert taken <= demand.workspace + GRAIN
    # Nor is it far too much.
    assert demand.workspace < 2 * max(taken, GIB // 2)


def test_memory_that_another_process_takes_while_steps_are_measured_is_not_planned(
    planned: PlannedModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = planned.memory.available // 2
    meanwhile(monkeypatch, "_compute_largest", lambda: greedy.leave(half), after=False)
    runner = ready(planned)
    assert 0.7 * half < cache_bytes(runner) < half
    assert list(worst_steps(runner))


def test_memory_that_another_process_takes_afterwards_is_a_clear_refusal(
    planned: PlannedModel, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, "size_caches", lambda: greedy.leave(GIB), after=True)
    with pytest.raises(OutOfMemoryPlan) as refusal:
        ready(planned)
    print(refusal.value)
    said = str(refusal.value)
    assert f"KV cache {planned.plan.kv_cache / GIB:.2f} GiB" in said
    assert "Free what other processes took" in said
    assert "out of memory" in said
    assert not refusal.value.permanent


def test_steps_that_do_not_fit_are_a_clear_refusal(planned: PlannedModel, greedy: Greedy) -> None:
    """Weights do, with a little beside them."""
    planned.read(lambda *_: None)
    free_all()
    greedy.leave(64 * MIB)
    with pytest.raises(
        OutOfMemoryPlan, match=rf"up to {STEP} tokens and {RUNNING} requests.*--max-step-tokens"
    ):
        ready(planned)
