"""Computes steps: owns the weights, the paged keys and values, and the device."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import structlog
import torch

from moebius_kernels.attention_plan import MAX_GROUP_KEYS
from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.operations import Operations
from moebius_proto.worker.v1 import engine_pb2
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.decode_graphs import DecodeGraphs, graph_sizes
from moebius_worker.engine.expert_load import INTERVAL_SECONDS, ExpertLoad
from moebius_worker.engine.layer_caches import allocate_caches, enter_states, leave_states
from moebius_worker.engine.memory import (
    GPU_SHARE,
    HOST_SHARE,
    Demand,
    MemoryPlan,
    check_host,
    plan_memory,
    plan_table,
)
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.kinds import only_kinds
from moebius_worker.engine.models.layer import asks_host
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import architecture_of, build_model
from moebius_worker.engine.step_inputs import DeviceInputs, HostInputs, StepInputs
from moebius_worker.engine.types import Slice
from moebius_worker.engine.weights.dummy import FORMS, DummyWeights, fill_whole
from moebius_worker.engine.weights.load import Loading, check_copies, plan_loading
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.engine.weights.reader import WeightReader
from moebius_worker.engine.weights.scheme import Scheme
from moebius_worker.host_memory import Memory, host_memory

# What is being done, and how many of how many bytes are.
Progress = Callable[[str, int, int], None]

# A step should not hold up the streams that share it for more than about a second on the slowest device.
STEP_TOKENS = {"cpu": 128, "cuda": 4096}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Where and how large.

    `device`: "auto" (CUDA if present), "cpu", "cuda", "cuda:1". `dtype`: "auto" (fp32 on the CPU, else the
    checkpoint's), "float32", "bfloat16", "float16". `kv_cache_bytes` and `max_model_len`: None leaves them to
    the memory plan; `threads`: None leaves them to PyTorch; `max_step_tokens`: None leaves it to the device.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_cache_bytes: int | None = None
    page_size: int = 16
    max_model_len: int | None = None
    threads: int | None = None
    max_step_tokens: int | None = None
    # Requests that are computed at the same time: the caches are divided for so many.
    max_running: int = 32
    # "model" is the dtype; "fp8" and "int8" take about half of bf16.
    kv_format: KvFormat = KvFormat.MODEL
    # Quantised weights: kept as they are stored, or expanded to the dtype. None: expanded on a CPU, where
    # that is faster, if they then fit into half of the memory.
    expand_weights: bool | None = None
    # The name of a form (`weights/dummy.py`): random weights in it, not the checkpoint's, to measure speed.
    dummy_weights: str | None = None


class Computed(NamedTuple):
    """What came of a step, or will: a GPU may be at it still."""

    # fp32 [slices that sample, vocab], in the order of the slices.
    logits: torch.Tensor
    # Waits for the handles of slices, sampled or not, in which some row is not finite: what they wrote to
    # their pages is wrong, though the logits may look well. Those whose logits are NaN may be missing.
    faulty: Callable[[], frozenset[int]]


class ModelRunner:
    def __init__(
        self,
        architecture: str,
        model: Decoder,
        plan: MemoryPlan,
        max_step_tokens: int,
        place: Place,
        kv_format: KvFormat,
    ) -> None:
        """Allocates the KV cache of `plan` at `place`, where the parameters of `model` are."""
        self.architecture = architecture
        self.vocab_size = model.config.vocab_size
        self.max_step_tokens = max_step_tokens
        self.layout = plan.layout
        self.max_model_len = plan.max_model_len
        self.device_name = str(place.device)
        self.dtype_name = str(place.dtype).removeprefix("torch.")
        self._model = model
        self._place = place
        self._caches = allocate_caches(
            model.caches,
            plan.layout,
            format=kv_format,
            dtype=place.dtype,
            device=place.device,
        )
        self._max_requests = plan.demand.max_running
        self._inputs: StepInputs = HostInputs(
            model.caches, self._caches, plan.layout, place, vocab_size=self.vocab_size
        )
        # Kernels get the same on the device "meta", for which they are only compiled.
        if place.device.type != "cpu":
            self._inputs = DeviceInputs(
                model.caches,
                self._caches,
                plan.layout,
                place,
                vocab_size=self.vocab_size,
                max_requests=self._max_requests,
                max_rows=max_step_tokens,
                max_model_len=plan.max_model_len,
            )
        self._graphs: DecodeGraphs | None = None
        # Whether steps are computed without graphs for the time being, though there are some.
        self.eager: Callable[[], bool] = lambda: False
        # On "meta" there is nothing to count.
        self._experts = ExpertLoad(math.inf if place.device.type == "meta" else INTERVAL_SECONDS)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        options: RunnerOptions,
        progress: Progress = lambda phase, done, total: None,
    ) -> Self:
        """Plans the memory, then reads the weights. Raises CheckpointError and OutOfMemoryPlan."""
        return cls.of(PlannedModel.of(checkpoint, options), progress)

    @classmethod
    def of(
        cls,
        planned: "PlannedModel",
        progress: Progress = lambda phase, done, total: None,
        plan: MemoryPlan | None = None,
    ) -> Self:
        """Reads the weights if they have not been read yet. `plan`: other caches than those that are planned.
        Raises CheckpointError."""
        planned.read(progress)
        return cls(
            planned.architecture,
            planned.model,
            plan or planned.plan,
            planned.max_step_tokens,
            planned.place,
            planned.kv_format,
        )

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """As `only_kinds`."""
        with only_kinds(self._model):
            yield

    def bind(self, operations: Operations) -> None:
        """What the model computes with from now on."""
        self._model.bind(operations)

    @torch.inference_mode()
    def step(self, slices: Sequence[Slice], progress: Callable[[], None] = lambda: None) -> Computed:
        """Computes the tokens, calling `progress` now and then, for a step may take long.

        Raises ValueError for a token id that is not in the vocabulary.
        """
        logits, finite = self._launch(slices, progress, None)
        return Computed(logits, frozenset if finite is None else partial(_faulty, slices, finite))

    def captured(self, slices: Sequence[Slice]) -> bool:
        """Whether a step of these is replayed from a CUDA graph."""
        return self._graphs is not None and self._graphs.fits(slices) and not self.eager()

    @torch.inference_mode()
    def launch(self, slices: Sequence[Slice], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of a step of decodes, in force until the next one, without waiting for the device. Those
        of a row that is not finite are NaN. `drawn`: as of `StepInputs`."""
        return self._launch(slices, lambda: None, drawn)[0]

    def _launch(
        self, slices: Sequence[Slice], progress: Callable[[], None], drawn: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        states = [(piece.state, piece.start) for piece in slices if piece.state is not None]
        enter_states(self._caches, states)
        computed = self._compute(slices, progress, drawn)
        leave_states(self._caches, [state for state, _ in states])
        return computed

    def capture(self, captured: Callable[[int], bool], progress: Progress) -> None:
        """Captures decode steps in CUDA graphs, of the sizes for which `captured` is true; none of a model
        that asks the host in the midst of them."""
        if asks_host(self._model):
            log.info("no CUDA graphs: a step of this model waits for the host")
        elif isinstance(self._inputs, DeviceInputs):
            graphs = DecodeGraphs(self._model, self._inputs, self._model.ops)
            sizes = [size for size in graph_sizes(self._max_requests) if captured(size)]
            graphs.capture(sizes, progress)
            self._graphs = graphs

    def expert_use(self) -> engine_pb2.ExpertUse | None:
        """How evenly the experts are used, if enough was seen since this was asked last."""
        return self._experts.take()

    def _compute(
        self, slices: Sequence[Slice], progress: Callable[[], None], drawn: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the slices that sample, and whether the hidden states of each row are finite; None: their
        logits show it, which the sampler looks at."""
        if self._graphs is not None and self.captured(slices):
            logits = self._graphs.run(slices, drawn)
            rows = [row for row, piece in enumerate(slices) if piece.sample]
            # A norm makes NaN of all of a row that is not finite, and so does the head.
            if len(rows) == len(slices):
                # The sampler will see it: the device need not be waited for twice.
                return logits, None
            return logits[rows], ~logits.isnan().all(dim=-1)
        context = self._inputs.context(slices, drawn=drawn)
        hidden = self._forward(context, progress)
        # A difference is not 0 where the number is not finite: fewer kernels than `isfinite` has.
        finite = (hidden - hidden).sum(dim=-1) == 0
        return self._model.logits(hidden[context.sampled]), finite

    def _forward(self, context: StepContext, progress: Callable[[], None]) -> torch.Tensor:
        """Hidden states; now and then with an eye on the experts."""
        if not self._experts.due():
            return self._model.forward(context, progress)
        ops = self._model.ops
        with self._experts.watched(ops) as watched:
            self._model.bind(watched)
            try:
                return self._model.forward(context, progress)
            finally:
                self._model.bind(ops)


@dataclass
class PlannedModel:
    """A model of which everything is known but the weights, and the memory that it is going to take."""

    architecture: str
    model: Decoder
    loading: Loading
    plan: MemoryPlan
    memory: Memory
    max_step_tokens: int
    place: Place
    kv_format: KvFormat
    _read: bool = field(default=False, init=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: RunnerOptions, *, estimated: bool = True) -> Self:
        """Takes no memory yet. `estimated`: what steps take of a GPU is counted by an estimate, which may be
        far too much; otherwise not at all before it is `measured`. Raises CheckpointError, and
        OutOfMemoryPlan for a model that does not fit."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        place = place_for(checkpoint, options)
        model = build_model(checkpoint.config, place)
        gpu = place.device.type == "cuda"
        if gpu:
            torch.cuda.set_device(place.device.index or 0)
        memory = Memory(*torch.cuda.mem_get_info(place.device)) if gpu else host_memory()
        loading = plan_weights(checkpoint, model, options, place, memory)
        step_tokens = options.max_step_tokens or STEP_TOKENS[place.device.type]
        check_host(loading.host_nbytes if gpu else 0, host_memory())
        weights = loading.packed_nbytes if gpu else loading.nbytes
        demand = _demand(model, weights, options, step_tokens, place.dtype)
        later = gpu and not estimated
        plan = plan_memory(
            replace(demand, workspace=0) if later else demand, memory, GPU_SHARE if gpu else HOST_SHARE
        )
        if not later:
            log.info("memory plan\n" + plan_table(plan))
        architecture = architecture_of(checkpoint.config)
        return cls(architecture, model, loading, plan, memory, step_tokens, place, options.kv_format)

    @property
    def leaves_room(self) -> bool:
        """Whether another process finds room for a layer and what it computes, beside the weights."""
        return 2 * self.plan.demand.weights < self.memory.available

    def measured(self, workspace: int, memory: Memory) -> None:
        """Plans the caches anew: steps take `workspace` bytes of the GPU's `memory`, in which the weights are
        already. Raises OutOfMemoryPlan."""
        demand = replace(self.plan.demand, workspace=workspace, measured=True)
        whole = Memory(memory.available + demand.weights, memory.total)
        self.plan = plan_memory(demand, whole, GPU_SHARE)
        log.info("memory plan\n" + plan_table(self.plan))

    def read(self, progress: Progress) -> None:
        """The weights, once. Raises CheckpointError."""
        if self._read:
            return
        self.loading.allocate(self.place)

        def told(name: str, done: int, total: int) -> None:
            progress("loading weights", done, total)

        if isinstance(self.loading.reader, DummyWeights):
            fill_whole(self.loading, told)
        else:
            self.loading.fill(progress=told)
        check_copies(self.loading.reader, self.model.copies)
        if self.place.device.type == "cuda":
            self.loading.pack()
        self._read = True
        log.info("weights loaded", **self.loading.stored_forms())


def _faulty(slices: Sequence[Slice], finite: torch.Tensor) -> frozenset[int]:
    """Handles of slices with a row that is not."""
    lengths = np.array([len(piece.token_ids) for piece in slices])
    sound = np.logical_and.reduceat(finite.cpu().numpy(), lengths.cumsum() - lengths)
    return frozenset(piece.handle for piece, whole in zip(slices, sound, strict=True) if not whole)


def plan_weights(
    checkpoint: Checkpoint, model: Decoder, options: RunnerOptions, place: Place, memory: Memory
) -> Loading:
    """Sizes are allocated, memory is not."""
    if options.dummy_weights is not None:
        if options.dummy_weights not in FORMS:
            raise CheckpointError(
                f"There are no dummy weights of the form {options.dummy_weights!r}. "
                f"Choose {', '.join(FORMS)}."
            )
        dummy = DummyWeights(model.slots(), FORMS[options.dummy_weights], place.device)
        reader: WeightReader = dummy
        scheme: Scheme = dummy
    else:
        reader, scheme = open_weights(checkpoint, model.LAYOUT)

    def planned(expand: bool) -> Loading:
        loading = plan_loading(reader, scheme, model.slots(), model.ignores, dtype=place.dtype, expand=expand)
        loading.allocate(Place(torch.device("meta"), place.dtype))
        return loading

    if options.expand_weights is not None:
        return planned(options.expand_weights)
    if place.device.type == "cpu" and (loading := planned(True)).nbytes * 2 < memory.available:
        return loading
    return planned(False)


def place_for(checkpoint: Checkpoint, options: RunnerOptions, *, elsewhere: bool = False) -> Place:
    """`elsewhere`: for a machine that may have other devices. Raises CheckpointError for a device that is not
    there and a dtype that is not offered."""
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise CheckpointError(f"The device {name!r} is not supported. Choose cpu, cuda or cuda:N.")
    if kind == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise CheckpointError(f"The device {name!r} was asked for, but PyTorch finds no GPU. Choose cpu.")
    dtype = options.dtype
    if dtype == "auto":
        declared = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
        dtype = "float32" if kind == "cpu" else declared
    if dtype not in _DTYPES:
        raise CheckpointError(f"The dtype {dtype!r} is not supported. Choose {', '.join(_DTYPES)} or auto.")
    return Place(torch.device(name), _DTYPES[dtype])


def _demand(model: Decoder, weights: int, options: RunnerOptions, rows: int, dtype: torch.dtype) -> Demand:
    """`weights`: their bytes; `rows`: the tokens of the largest step."""
    config, caches = model.config, model.caches
    if (asked := options.max_model_len) is not None and asked > config.max_position_embeddings:
        raise CheckpointError(
            f"max_model_len = {asked} is more than the {config.max_position_embeddings} positions that the "
            "model was made for. Lower it."
        )
    longest = asked or config.max_position_embeddings
    gathered = max((spec.kv_heads * (spec.key_dim + spec.value_dim) for spec in caches.kv), default=0)
    return Demand(
        weights=weights,
        # Rows and their logits in fp32, what a prefill's attention masks, and one layer's keys and values
        # gathered from their pages, in fp32 where they are quantised.
        workspace=4 * rows * (model.row_elements + config.vocab_size)
        + model.PAIR_BYTES * rows * longest
        + 4 * max(MAX_GROUP_KEYS, longest) * gathered,
        page_bytes=caches.page_bytes(options.page_size, options.kv_format, dtype, windowed=False),
        page_size=options.page_size,
        context_len=config.max_position_embeddings,
        max_model_len=asked,
        kv_cache_bytes=options.kv_cache_bytes,
        window=caches.longest_window,
        window_page_bytes=caches.page_bytes(options.page_size, options.kv_format, dtype, windowed=True),
        state_slot_bytes=caches.state_bytes(dtype),
        # A step computes a token of each, at least.
        max_running=min(options.max_running, rows),
        max_step_tokens=rows,
    )
