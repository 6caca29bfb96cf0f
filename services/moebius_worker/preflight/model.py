"""A checkpoint as the subject of a preflight: some of its layers, with their own weights."""

import torch

from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.operations import REFERENCE, Operations
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.memory import Demand, MemoryPlan
from moebius_worker.engine.models.registry import architecture_of, build_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions, place_for, plan_weights
from moebius_worker.host_memory import Memory, host_memory
from moebius_worker.preflight.kinds import keep_kinds
from moebius_worker.preflight.machine import Cuda, Host, device_here
from moebius_worker.preflight.subject import ProbeStep
from moebius_worker.preflight.workload import CONTEXT, Workload


class ModelSubject:
    """Runs steps as the engine does: `ModelRunner` with small caches, in which some text is already."""

    def __init__(self, path: str, options: RunnerOptions, max_step_tokens: int) -> None:
        checkpoint = open_checkpoint(path)
        place = place_for(checkpoint, options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        gpu = place.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(place.device.index or 0)
        self.device = device_here(place.device.type)
        self.machine = Cuda() if gpu else Host()
        self._model = build_model(checkpoint.config, place)
        memory = Memory(*torch.cuda.mem_get_info(place.device)) if gpu else host_memory()
        loading = keep_kinds(self._model, plan_weights(checkpoint, self._model, options, place, memory))
        loading.allocate(place)
        loading.fill()
        if gpu:
            loading.pack()
        specs = self._model.caches
        plan = _small_caches(specs.longest_window, bool(specs.states), options, max_step_tokens)
        self._runner = ModelRunner(
            architecture_of(checkpoint.config), self._model, plan, max_step_tokens, place, options.kv_format
        )
        self._workload = Workload(plan.layout, self._runner.vocab_size, plan.max_model_len)
        self._draw_tokens = REFERENCE.draw_tokens
        # Something to look back at.
        self.run(ProbeStep("prefill", max_step_tokens))

    def bind(self, operations: Operations) -> None:
        self._runner.bind(operations)
        self._draw_tokens = operations.draw_tokens

    def run(self, step: ProbeStep) -> None:
        logits = self._runner.step(self._workload.slices(step)).logits
        self._workload.draw(logits, self._draw_tokens)


def open_subject(
    model: str,
    device: str,
    dtype: str,
    page_size: int,
    kv_format: str,
    threads: int | None,
    expand_weights: bool | None,
    dummy_weights: str | None,
    max_running: int,
    max_step_tokens: int,
) -> ModelSubject:
    """From what travels to a process as JSON. Raises CheckpointError."""
    options = RunnerOptions(
        device=device,
        dtype=dtype,
        page_size=page_size,
        kv_format=KvFormat(kv_format),
        threads=threads,
        expand_weights=expand_weights,
        dummy_weights=dummy_weights,
        max_running=max_running,
    )
    return ModelSubject(model, options, max_step_tokens)


def _small_caches(
    window: int | None, states: bool, options: RunnerOptions, max_step_tokens: int
) -> MemoryPlan:
    """`states`: there are layers of linear attention."""
    tokens = CONTEXT + max_step_tokens
    pages = max(-(-tokens // options.page_size), options.max_running) + 4
    layout = CacheLayout(
        page_size=options.page_size,
        num_pages=pages,
        window=window,
        num_window_pages=0 if window is None else pages,
        state_slots=max(options.max_running, 3) if states else 0,
    )
    demand = Demand(0, 0, 0, options.page_size, tokens, None, None, max_running=options.max_running)
    return MemoryPlan(0, demand, layout, tokens)
