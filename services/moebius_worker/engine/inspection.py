"""What a checkpoint is: family, forms of its weights, parameters, bytes, and what its texts take."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moebius_kernels.kv_pages import KvFormat
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.parameters import Place, Shard
from moebius_worker.engine.models.registry import architecture_of, build_model
from moebius_worker.engine.weights.layout import LaidOut
from moebius_worker.engine.weights.load import Fill, Loading, plan_loading
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.engine.weights.reader import WeightReader

# The first that is found in a parameter's name says what kind of layer it belongs to.
_KINDS = (
    (r"\.experts\.\d+\.", "routed experts"),
    (r"shared_expert", "shared experts"),
    (r"norm", "norms"),
    (r"(self|linear)_attn|\.attn\.", "attention"),
    (r"embed|ngram", "embeddings"),
    (r"^lm_head", "head"),
    (r"\.mlp\.(gate|router)\.|block_sparse_moe\.gate\.|\.router\.|shared_expert_gate|per_expert", "router"),
    (r"\.mlp\.|feed_forward", "dense feed-forward"),
)


@dataclass(frozen=True, slots=True)
class KindRow:
    """A kind of layer: the forms of its weights with the number of parameters in each, and stored bytes."""

    kind: str
    forms: Mapping[str, int]
    nbytes: int

    @property
    def parameters(self) -> int:
        return sum(self.forms.values())


@dataclass(frozen=True, slots=True)
class Inspection:
    """`active`: the parameters that compute one token. Bytes of the caches are for the model's dtype.

    `window`: how far back the layers with a window see; `window_token_bytes`: what they keep of each position
    in it. `state_bytes`: what linear-state layers keep of a text. `memory`: bytes of the weights as they are
    stored and expanded, by the words for it.
    """

    name: str
    container: str
    architecture: str
    quantisation: str
    dtype: str
    kinds: Sequence[KindRow]
    active: int
    left_out: Mapping[str, int]
    memory: Mapping[str, int]
    context: int
    token_bytes: int
    window: int | None
    window_token_bytes: int
    state_bytes: int

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.kinds)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.kinds)


def inspect_checkpoint(checkpoint: Checkpoint, dtype: torch.dtype) -> Inspection:
    """Reads headers alone; `dtype`: what it would compute in. Raises CheckpointError for what is refused."""
    place = Place(torch.device("cpu"), dtype)
    model = build_model(checkpoint.config, place)
    reader, scheme = open_weights(checkpoint, model.LAYOUT)

    def planned(expand: bool) -> tuple[Loading, int]:
        loading = plan_loading(reader, scheme, model.slots(), model.ignores, dtype=dtype, expand=expand)
        loading.allocate(Place(torch.device("meta"), dtype))
        return loading, loading.nbytes

    loading, stored = planned(False)
    _, expanded = planned(True)
    name = str(dtype).removeprefix("torch.")
    memory = {"as stored": stored, f"expanded to {name}": expanded}
    if stored == expanded:
        memory = {f"in {name}": stored}
    kinds = _kinds(loading)
    caches = model.caches
    return Inspection(
        name=checkpoint.name,
        container=checkpoint.container,
        architecture=architecture_of(checkpoint.config),
        quantisation=scheme.name,
        dtype=name,
        kinds=kinds,
        active=_active(model, loading.fills),
        left_out=_left_out(reader, model),
        memory=memory,
        context=model.config.max_position_embeddings,
        token_bytes=caches.page_bytes(1, KvFormat.MODEL, dtype, windowed=False),
        window=caches.longest_window,
        window_token_bytes=caches.page_bytes(1, KvFormat.MODEL, dtype, windowed=True),
        state_bytes=caches.state_bytes(dtype),
    )


def _numbers(fill: Fill) -> int:
    return torch.Size(fill.slot.shape).numel()


def _form(fill: Fill, loading: Loading) -> str:
    if fill.form:
        return fill.form.format.name
    return loading.reader.tensors[fill.source].dtype.lower().replace("f", "fp", 1).replace("bfp", "bf")


def _kinds(loading: Loading) -> list[KindRow]:
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    nbytes: Counter[str] = Counter()
    for fill in loading.fills:
        if not fill.source:
            continue
        kind = next((kind for pattern, kind in _KINDS if re.search(pattern, fill.name)), "other")
        forms[kind][_form(fill, loading)] += _numbers(fill)
        nbytes[kind] += fill.nbytes
    return [KindRow(kind, dict(forms[kind]), nbytes[kind]) for kind, _ in nbytes.most_common()]


def _active(model: Decoder, fills: Sequence[Fill]) -> int:
    routed = sum(_numbers(fill) for fill in fills if fill.slot.owner.shard is Shard.EXPERT)
    return round(sum(map(_numbers, fills)) - routed * (1 - model.expert_share))


def _left_out(reader: WeightReader, model: Decoder) -> dict[str, int]:
    """How many tensors are left out on purpose, by the beginning of their names."""
    names = [name for name in reader.tensors if model.ignores(name)]
    if isinstance(reader, LaidOut):
        names += reader.left_out
    # A whole layer, as those that guess further tokens are, has its number.
    starts = (re.match(r"model\.layers\.\d+|[^.]+(\.[^.]+)?", name) for name in names)
    return dict(Counter(start[0] for start in starts if start))
