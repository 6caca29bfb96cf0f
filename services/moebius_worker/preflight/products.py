"""What a model multiplies with: the shapes and forms of its dense layers and routed experts."""

from collections.abc import Iterator

from moebius_kernels.formats.pack import packed_format
from moebius_kernels.tuning import DenseProduct, ExpertProduct, Product
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.models.layer import Layer, layers_in
from moebius_worker.engine.models.layers import Linear
from moebius_worker.engine.models.moe import MoeConfig, ResidentExperts
from moebius_worker.engine.models.parameters import Matrix
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.runner import RunnerOptions, place_for, plan_weights
from moebius_worker.host_memory import host_memory


def products_of(checkpoint: Checkpoint, dummy_weights: str | None = None) -> list[Product]:
    """Each once, routed experts first, as a GPU would have them; only headers are read.

    `dummy_weights`: as if the weights were of this form (`engine/weights/dummy.py`), of which nothing but the
    config is needed. Raises CheckpointError.
    """
    options = RunnerOptions(device="cpu", dtype="bfloat16", expand_weights=False, dummy_weights=dummy_weights)
    place = place_for(checkpoint, options)
    model = build_model(checkpoint.config, place)
    # Gives matrices their forms, and no memory.
    plan_weights(checkpoint, model, options, place, host_memory())
    experts: dict[Product, None] = {}
    dense: dict[Product, None] = {}
    for layer in _all(model):
        if isinstance(layer, Linear):
            dense |= dict.fromkeys(_dense(layer.weight))
        config, store = getattr(layer, "config", None), getattr(layer, "experts", None)
        if isinstance(config, MoeConfig) and isinstance(store, ResidentExperts):
            experts |= dict.fromkeys(_experts(config, store))
    return [*experts, *dense, *_dense(model.head)]


def _all(layer: Layer) -> Iterator[Layer]:
    yield layer
    for part in layers_in(vars(layer).values()):
        yield from _all(part)


def _dense(matrix: Matrix) -> Iterator[Product]:
    for block in matrix.blocks:
        rows, columns = block.shape
        yield DenseProduct(packed_format(block.format), rows, columns)


def _experts(config: MoeConfig, store: ResidentExperts) -> Iterator[Product]:
    [down] = store.down.blocks
    # Gate and up in unlike forms are no kernel's.
    if len({block.format for block in store.gate_up.blocks}) == 1:
        gate_up = packed_format(store.gate_up.blocks[0].format)
        sizes = config.total, config.per_token, config.hidden_size, config.inner
        yield ExpertProduct(gate_up, packed_format(down.format), *sizes)
