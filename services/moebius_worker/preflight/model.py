"""A checkpoint as the subject of a preflight: some of its layers, with their own weights."""

import random
from collections.abc import Sequence

import torch

from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.operations import Operations
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.memory import Demand, MemoryPlan
from moebius_worker.engine.models.registry import architecture_of, build_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions, place_for, plan_weights
from moebius_worker.engine.types import Slice, StateStep
from moebius_worker.host_memory import Memory, host_memory
from moebius_worker.preflight.kinds import keep_kinds
from moebius_worker.preflight.machine import Cuda, Host, device_here
from moebius_worker.preflight.subject import ProbeStep

# Tokens that a request may have behind it, at most; the cache holds so many beside the largest step.
CONTEXT = 4096


class ModelSubject:
    """Runs steps as the engine does: `ModelRunner` with small caches, in which some text is already."""

    def __init__(self, path: str, options: RunnerOptions, max_step_tokens: int) -> None:
        checkpoint = open_checkpoint(path)
        place = place_for(checkpoint, options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        gpu = place.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(place.device)
        self.device = device_here(place.device.type)
        self.machine = Cuda() if gpu else Host()
        self._model = build_model(checkpoint.config, place)
        memory = Memory(*torch.cuda.mem_get_info(place.device)) if gpu else host_memory()
        loading = keep_kinds(self._model, plan_weights(checkpoint, self._model, options, place, memory))
        loading.allocate(place)
        loading.fill()
        plan = _small_caches(self._model.caches.longest_window, options, max_step_tokens)
        self._layout, self._states = plan.layout, bool(self._model.caches.states)
        self._context = min(CONTEXT, self._model.config.max_position_embeddings - max_step_tokens)
        self._runner = ModelRunner(
            architecture_of(checkpoint.config), self._model, plan, max_step_tokens, place, options.kv_format
        )
        self._random = random.Random(0)
        # Something to look back at.
        self._runner.step([self._slice(0, 0, max_step_tokens)])

    def bind(self, operations: Operations) -> None:
        self._model.bind(operations)

    def run(self, step: ProbeStep) -> None:
        match step.kind:
            case "prefill":
                slices = [self._slice(0, self._past(), step.tokens)]
            case "decode":
                slices = [self._slice(number, self._past(), 1) for number in range(step.tokens)]
            case "mixed":
                slices = [self._slice(number, self._past(), 1) for number in range(2)]
                slices.append(self._slice(2, self._past(), step.tokens - 2))
        self._runner.step(slices)

    def _past(self) -> int:
        """How much text there is before a slice: nothing, a little, or much."""
        return self._random.choice((0, self._random.randrange(64), self._random.randrange(CONTEXT)))

    def _slice(self, number: int, start: int, count: int) -> Slice:
        """Request `number` of a step: it reads whatever pages and writes to pages of its own, of which the
        last request may have several."""
        start = max(0, min(start, self._context - 1))
        size = self._layout.page_size
        first, last = start // size, -(-(start + count) // size)
        mine = list(range(number, number + last - first))
        pages = [self._random.randrange(self._layout.num_pages) for _ in range(first)] + mine
        window_pages: Sequence[int] = ()
        if self._layout.window is not None:
            oldest = self._layout.window_start(start)
            window_pages = [-1] * oldest + pages[oldest:]
        return Slice(
            handle=number,
            token_ids=tuple(self._random.choices(range(self._runner.vocab_size), k=count)),
            start=start,
            pages=tuple(pages),
            sample=True,
            window_pages=tuple(window_pages),
            state=StateStep(number) if self._states else None,
        )


def open_subject(
    model: str,
    device: str,
    dtype: str,
    page_size: int,
    kv_format: str,
    threads: int | None,
    expand_weights: bool | None,
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
        max_running=max_running,
    )
    return ModelSubject(model, options, max_step_tokens)


def _small_caches(window: int | None, options: RunnerOptions, max_step_tokens: int) -> MemoryPlan:
    tokens = CONTEXT + max_step_tokens
    pages = max(-(-tokens // options.page_size), options.max_running) + 4
    layout = CacheLayout(
        page_size=options.page_size,
        num_pages=pages,
        window=window,
        num_window_pages=0 if window is None else pages,
        state_slots=max(options.max_running, 3),
    )
    demand = Demand(0, 0, 0, options.page_size, tokens, None, None, max_running=options.max_running)
    return MemoryPlan(0, demand, layout, tokens)
