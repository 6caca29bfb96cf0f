"""Steps whose tokens are still on the device: inputs of both kinds find them in the rows that slices name."""

import pytest
import torch

from moebius_kernels.device_plan import DeviceStatePlan
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.layer_caches import CacheSpecs, KvSpec, StateSpec
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.step_inputs import DeviceInputs, HostInputs, StepInputs
from moebius_worker.engine.types import Slice, StateStep

LAYOUT = CacheLayout(page_size=4, num_pages=8)
PLACE = Place(torch.device("cpu"), torch.float32)


def inputs(kind: str) -> StepInputs:
    specs = CacheSpecs()
    specs.add(KvSpec(kv_heads=1, key_dim=16, value_dim=16))
    if kind == "host":
        return HostInputs(specs, (), LAYOUT, PLACE, vocab_size=100)
    return DeviceInputs(
        specs, (), LAYOUT, PLACE, vocab_size=100, max_requests=4, max_rows=8, max_model_len=32
    )


def test_rows_that_fill_a_step_up_have_no_state() -> None:
    specs = CacheSpecs()
    specs.add(StateSpec({"memory": (2,)}, {}))
    made = DeviceInputs(
        specs, (), LAYOUT, PLACE, vocab_size=100, max_requests=4, max_rows=8, max_model_len=32
    )
    slices = [
        Slice(handle, (7,), 5, (0, 1), sample=True, state=StateStep(slot))
        for handle, slot in ((9, 3), (4, 1))
    ]
    plan = made.context(slices, pad_to=4).states
    assert isinstance(plan, DeviceStatePlan)
    assert plan.rows.tolist() == [0, 1, 2, 3]
    assert plan.slots.tolist() == [3, 1, -1, -1]
    # As those of `plan_states_on_device`, but empty.
    assert plan.spans.shape == plan.chunks.shape == (0, 4)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_rows_of_prompts_and_decodes(kind: str) -> None:
    made = inputs(kind)
    slices = [
        Slice(1, (30, 31, 32), 4, (0, 1), sample=False),
        Slice(2, (40,), 9, (2, 3, 4), sample=True),
        Slice(3, (50, 51), 0, (5,), sample=True),
    ]
    # What was there before does not matter.
    for part in (slices, slices[::-1], slices):
        context = made.context(part)
    assert context.token_ids.tolist() == [30, 31, 32, 40, 50, 51]
    assert context.positions.tolist() == [4, 5, 6, 9, 0, 1]
    assert context.sampled.tolist() == [3, 5]
    assert made.context(slices[:1]).sampled.shape == (0,)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_token_beyond_the_vocabulary_names_its_request(kind: str) -> None:
    slices = [Slice(5, (99,), 0, (0,), sample=True), Slice(6, (1, 100), 0, (1,), sample=True)]
    with pytest.raises(ValueError, match="request 6 holds the token id 100; the vocabulary ends at 99"):
        inputs(kind).context(slices)


@pytest.mark.parametrize(("kind", "pad_to"), [("host", 0), ("device", 0), ("device", 4)])
def test_tokens_that_were_drawn_in_the_step_before(kind: str, pad_to: int) -> None:
    made = inputs(kind)
    drawn = torch.tensor([70, 71, 72, 73])
    slices = [
        Slice(handle, (~row,), 5, (2 * row, 2 * row + 1), sample=True) for handle, row in ((9, 3), (4, 1))
    ]
    context = made.context(slices, pad_to=pad_to, drawn=drawn)
    assert context.token_ids.tolist() == [73, 71] + [0] * (pad_to - 2)
    assert context.positions.tolist()[:2] == [5, 5]
    assert drawn.tolist() == [70, 71, 72, 73]
    # The next one has tokens of its own again.
    slices = [piece._replace(token_ids=(30 + piece.handle,)) for piece in slices]
    assert made.context(slices, pad_to=pad_to).token_ids.tolist()[:2] == [39, 34]
