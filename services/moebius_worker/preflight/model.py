"""A checkpoint as the subject of a preflight: some of its layers, with their own weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.operations import REFERENCE, Operations
from moebius_kernels.registry import Architecture, Device
from moebius_worker.checkpoint.checkpoint import Checkpoint, open_checkpoint
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.memory import Demand, MemoryPlan
from moebius_worker.engine.models.kinds import keep_kinds
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import architecture_of, build_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions, place_for, plan_weights
from moebius_worker.host_memory import Memory, host_memory
from moebius_worker.preflight.machine import Cuda, Host, device_here
from moebius_worker.preflight.subject import ProbeStep
from moebius_worker.preflight.workload import CONTEXT, Workload


class ModelSubject:
    """Runs steps as the engine does: `ModelRunner` with small caches, in which some text is already."""

    def __init__(
        self, path: str, options: RunnerOptions, max_step_tokens: int, sizes_on: Device | None = None
    ) -> None:
        """`sizes_on`: nothing has numbers, only the sizes that it would have on this device."""
        checkpoint = open_checkpoint(path)
        if sizes_on is None:
            place = place_for(checkpoint, options)
            self.device = device_here(place.device.type)
        else:
            place = Place(torch.device("meta"), place_for(checkpoint, replace(options, device="cpu")).dtype)
            self.device = sizes_on
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        gpu = place.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(place.device.index or 0)
        self.machine = Cuda() if gpu else Host()
        self._model = build_model(checkpoint.config, place)
        memory = Memory(*torch.cuda.mem_get_info(place.device)) if gpu else host_memory()
        loading = keep_kinds(self._model, plan_weights(checkpoint, self._model, options, place, memory))
        loading.allocate(place)
        if sizes_on is None:
            loading.fill()
        if place.device.type != "cpu":
            loading.pack()
        specs = self._model.caches
        plan = _small_caches(specs.longest_window, bool(specs.states), options, max_step_tokens)
        self._runner = ModelRunner(
            architecture_of(checkpoint.config), self._model, plan, max_step_tokens, place, options.kv_format
        )
        self._workload = Workload(plan.layout, self._runner.vocab_size, plan.max_model_len)
        self._draw_tokens = REFERENCE.draw_tokens
        if sizes_on is None:
            # Something to look back at.
            self.run(ProbeStep("prefill", max_step_tokens))

    def bind(self, operations: Operations) -> None:
        self._runner.bind(operations)
        self._draw_tokens = operations.draw_tokens

    def run(self, step: ProbeStep) -> None:
        logits = self._runner.launch(self._workload.slices(step))
        self._workload.draw(logits, self._draw_tokens)


def open_subject(model: str, architecture: Sequence[int] | None = None, **options: Any) -> ModelSubject:
    """From what travels to a process as JSON (`subject_options`). `architecture` is its GPU's anyway. Raises
    CheckpointError."""
    return ModelSubject(model, *_given(**options))


def open_sizes(model: str, architecture: Sequence[int] | None = None, **options: Any) -> ModelSubject:
    """The same without numbers: on a GPU of this architecture, which need not be asked then, or on the one
    that is here."""
    if architecture is None:
        device = device_here("cuda")
    else:
        major, minor = architecture
        device = Device("cuda", "a GPU that is not here", (major, minor))
    return ModelSubject(model, *_given(**options), device)


def subject_options(
    checkpoint: Checkpoint,
    options: RunnerOptions,
    dtype: torch.dtype,
    max_step_tokens: int,
    architecture: Architecture | None,
) -> dict[str, Any]:
    """Of `open_subject` and `open_sizes`."""
    return {
        "model": str(checkpoint.path),
        "architecture": architecture,
        "device": options.device,
        "dtype": str(dtype).removeprefix("torch."),
        "page_size": options.page_size,
        "kv_format": options.kv_format.value,
        "threads": options.threads,
        "expand_weights": options.expand_weights,
        "dummy_weights": options.dummy_weights,
        "max_running": options.max_running,
        "max_step_tokens": max_step_tokens,
    }


def _given(kv_format: str, max_step_tokens: int, **others: Any) -> tuple[RunnerOptions, int]:
    return RunnerOptions(kv_format=KvFormat(kv_format), **others), max_step_tokens


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
