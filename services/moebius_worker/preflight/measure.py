"""A runner whose caches are as large as the largest steps, measured on the GPU, leave room for."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.decode_graphs import graph_sizes
from moebius_worker.engine.memory import GIB, MemoryPlan, OutOfMemoryPlan
from moebius_worker.engine.models.layer import asks_host
from moebius_worker.engine.runner import ModelRunner, PlannedModel, Progress
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.types import SampleRow, SamplingParams, Slice
from moebius_worker.host_memory import Memory
from moebius_worker.preflight.machine import ran_out
from moebius_worker.preflight.prepare import Prepared
from moebius_worker.preflight.run import PreflightMemoryError
from moebius_worker.preflight.subject import ProbeStep
from moebius_worker.preflight.workload import Workload

# Bytes of a GPU that may be its driver's alone: a context, kernels, graphs.
_DRIVERS = 2 * GIB
# Logits are copied to be changed, then cut off, and all of them become probabilities.
_COSTLY = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=20)


class DeviceMemory(Protocol):
    def settle(self) -> Memory:
        """Gives back what nobody holds. From now on `most` counts."""
        ...

    def outside(self) -> int:
        """Bytes in use that are not PyTorch's: of the driver, of kernels, graphs and other processes."""
        ...

    def most(self) -> int:
        """`outside`, and the bytes that PyTorch had at most since `settle`."""
        ...


class CudaMemory:
    """As the driver and PyTorch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> Memory:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return Memory(*torch.cuda.mem_get_info(self._device))

    def outside(self) -> int:
        torch.cuda.synchronize(self._device)
        return _outside(self._device)

    def most(self) -> int:
        return self.outside() + torch.cuda.max_memory_reserved(self._device)


def _outside(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def make_runner(planned: PlannedModel, kernels: Prepared, progress: Progress, *, graphs: bool) -> ModelRunner:
    """One that is ready: kernels are loaded, and decodes captured if `graphs` are wanted.

    Raises CheckpointError and OutOfMemoryPlan.
    """
    graphs = graphs and bool(kernels.plan.choices)
    with refusing_plainly(planned):
        planned.read(progress)
        if planned.place.device.type == "cuda":
            memory = CudaMemory(planned.place.device)
            counted = graphs and not asks_host(planned.model)
            size_caches(planned, kernels, memory, progress, graphs=counted)
        runner = ModelRunner.of(planned)
        runner.bind(kernels.operations)
        if graphs:
            runner.capture(kernels.plan.capturable, progress)
        kernels.warm_up(runner, lambda phase, done, total: progress(phase, 0, 0))
    return runner


@contextlib.contextmanager
def refusing_plainly(planned: PlannedModel) -> Iterator[None]:
    """Makes a refusal with numbers of a GPU's memory that has run out. A refusal is permanent only if nobody
    else had some of it that could be given back. Raises OutOfMemoryPlan."""
    try:
        yield
    except OutOfMemoryPlan as refusal:
        # What others took while it was measured has been counted too.
        raise OutOfMemoryPlan(str(refusal), permanent=refusal.permanent and _alone(planned)) from refusal
    except PreflightMemoryError as error:
        raise _refusal(planned, error.said) from error
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise _refusal(planned, str(error)) from error


def _refusal(planned: PlannedModel, said: str) -> OutOfMemoryPlan:
    """`said`: by the device."""
    plan, memory = planned.plan, planned.memory
    counted = f"weights {plan.demand.weights / GIB:.2f} GiB"
    if plan.demand.measured:
        workspace, caches = plan.demand.workspace / GIB, plan.kv_cache / GIB
        counted += f" + workspace {workspace:.2f} GiB + KV cache {caches:.2f} GiB"
    return OutOfMemoryPlan(
        f"The GPU's memory ran out. {memory.available / GIB:.2f} GiB of {memory.total / GIB:.2f} GiB was "
        f"available at first, and was to hold {counted}, with steps of up to {planned.max_step_tokens} "
        f"tokens and {plan.demand.max_running} requests. Free what other processes took meanwhile, or "
        "ask for less: a smaller model, --kv-cache-memory, --max-step-tokens, --max-running, "
        f"--max-model-len. The device said: {said}",
        permanent=_alone(planned),
    )


def _alone(planned: PlannedModel) -> bool:
    """Whether no more of the GPU is in other hands, now and at first, than its driver takes."""
    device, memory = planned.place.device, planned.memory
    if device.type != "cuda":
        return False
    return max(memory.total - memory.available, _outside(device)) <= _DRIVERS


def size_caches(
    planned: PlannedModel, kernels: Prepared, memory: DeviceMemory, progress: Progress, *, graphs: bool
) -> None:
    """Plans the caches of `planned`, whose weights have been read, by what the largest steps take with
    caches that are just large enough for them. `graphs`: decodes are going to be captured.

    What other processes take or give back meanwhile counts too. Raises OutOfMemoryPlan, and what a device
    without memory raises.
    """
    progress("measuring the memory of steps", 0, 0)
    before = memory.settle()
    plan = replace(planned.plan, layout=_small_layout(planned.plan))
    most, more = _compute_largest(planned, kernels, plan, memory, graphs)
    taken = most - (before.total - before.available)
    memory.settle()
    planned.measured(max(0, taken - plan.kv_cache) + more, before)


def _compute_largest(
    planned: PlannedModel, kernels: Prepared, plan: MemoryPlan, memory: DeviceMemory, graphs: bool
) -> tuple[int, int]:
    """The largest steps, in the order in which an engine begins: graphs, then the others. Only the largest
    graph is captured. The most bytes that were in use, and those that the other graphs will take beside."""
    runner = ModelRunner.of(planned, plan=plan)
    runner.bind(kernels.operations)
    layout, longest = plan.layout, plan.max_model_len
    # Where one of the pools is too small for the largest steps, there will be none.
    pages = layout.num_pages if layout.window is None else min(layout.num_pages, layout.num_window_pages)
    running = min(plan.demand.max_running, max(1, pages - 1), layout.state_slots or plan.demand.max_running)
    decode = Workload(layout, runner.vocab_size, longest).slices(ProbeStep("decode", running))
    # The last chunk of the longest text.
    rows = min(planned.max_step_tokens, longest, max(1, (pages - 2) * layout.page_size))
    chunk = Workload(layout, runner.vocab_size, longest, longest=True).slices(ProbeStep("prefill", rows))
    _compute(runner, kernels, decode)
    more = 0
    captured = graph_sizes(plan.demand.max_running)
    if graphs and (sizes := [size for size in captured if kernels.plan.capturable(size)]):
        # What has been loaded until now is not the graph's.
        before = memory.outside()
        runner.capture(lambda size: size == sizes[-1], lambda phase, done, total: None)
        # The driver takes some of its memory when it is launched first.
        _compute(runner, kernels, decode[: sizes[-1]])
        each = max(0, memory.outside() - before)
        # They share the memory of what they compute, all but the results.
        more = each * (len(sizes) - 1) + sum(sizes[:-1]) * runner.vocab_size * torch.float32.itemsize
    _compute(runner, kernels, chunk)
    # While the graph is there, some of whose memory is the driver's.
    return memory.most(), more


@torch.inference_mode()
def _compute(runner: ModelRunner, kernels: Prepared, slices: Sequence[Slice]) -> None:
    """Other layers of a kind take what the first one gave back."""
    if not slices:
        return
    with runner.one_layer_of_each_kind():
        # Without its other layers a model computes nonsense. Of equals the most are kept.
        logits = runner.step(slices).logits.zero_()
    rows = [SampleRow(_COSTLY, piece.token_ids[:1], ()) for piece in slices]
    sample(logits, rows, draw_tokens=kernels.operations.draw_tokens)


def _small_layout(plan: MemoryPlan) -> CacheLayout:
    """What the largest steps need, and no more than is planned."""
    layout, running = plan.layout, plan.demand.max_running
    # A chunk begins and ends anywhere in a page; decodes write to a page each.
    chunk = min(plan.demand.max_step_tokens, plan.max_model_len) // layout.page_size + 2
    pages = max(chunk, running + 1)
    return replace(
        layout,
        num_pages=min(layout.num_pages, pages),
        num_window_pages=min(layout.num_window_pages, max(pages, layout.window_reach)),
        state_slots=min(layout.state_slots, running),
    )
