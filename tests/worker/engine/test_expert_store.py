"""Every family with experts computes with the slots that its store tells, wherever these are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.router import Route
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.models.layer import Layer, layers_in
from moebius_worker.engine.models.moe import ExpertStore
from moebius_worker.engine.models.parameters import Slots
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep
from tests.worker.checkpoint.gguf_models import FAMILIES, original_config, original_model

WITH_EXPERTS = [
    family
    for family in FAMILIES
    if any(key in original_config(family) for key in ("num_experts_per_tok", "top_k_experts"))
    and original_config(family).get("enable_moe_block", True)
]


class FewSlots:
    """Of a resident store those experts that a step asks for, in slots that change with each step."""

    def __init__(self, inner: ExpertStore) -> None:
        self.inner, self.fetches = inner, 0
        self.random = torch.Generator().manual_seed(0)

    def fetch(self, route: Route) -> ExpertWeights:
        self.fetches += 1
        whole = self.inner.fetch(route)
        used = route.experts.unique()
        chosen = used[torch.randperm(len(used), generator=self.random)]

        def moved(matrix: StoredMatrix) -> StoredMatrix:
            parts = {name: part[chosen] for name, part in matrix.parts.items()}
            return StoredMatrix(matrix.format, (len(chosen), *matrix.shape[1:]), parts)

        # Where no expert is, no step may look.
        slots = torch.full((whole.num_slots,), 1 << 40)
        slots[chosen] = torch.arange(len(chosen))
        biases = (None if bias is None else bias[chosen] for bias in (whole.gate_up_bias, whole.down_bias))
        return ExpertWeights([moved(matrix) for matrix in whole.gate_up], moved(whole.down), *biases, slots)

    def slots(self, prefix: str) -> Slots:
        return self.inner.slots(prefix)


def stores_replaced(layer: Layer) -> Iterator[FewSlots]:
    for name, value in list(vars(layer).items()):
        if hasattr(value, "fetch") and not isinstance(value, FewSlots):
            store = FewSlots(value)
            setattr(layer, name, store)
            yield store
    for inner in layers_in(vars(layer).values()):
        yield from stores_replaced(inner)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_in_other_slots(family: str, tmp_path: Path) -> None:
    original_model(family).save_pretrained(tmp_path)
    runner = ModelRunner.load(
        open_checkpoint(str(tmp_path)), RunnerOptions(device="cpu", kv_cache_bytes=4 << 20, max_running=2)
    )

    def logits(slot: int) -> torch.Tensor:
        layout, pages = runner.layout, (2 * slot, 2 * slot + 1)
        windows = pages if layout.window else ()
        state = StateStep(slot) if layout.state_slots else None
        ids = tuple(range(3, 23))
        first = Slice(slot, ids[:17], 0, pages, True, windows, state)
        second = Slice(slot, ids[17:], 17, pages, True, windows, state)
        return torch.cat([runner.step([piece]).logits for piece in (first, second)])

    resident = logits(0)
    stores = list(stores_replaced(runner._model))
    assert stores
    torch.testing.assert_close(logits(1), resident, atol=1e-5, rtol=1e-5)
    assert all(store.fetches == 2 for store in stores)
