"""Steps whose inputs are made while a GPU is busy: nobody waits for it, and each finds its own."""

import random

import pytest
import torch

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.layer_caches import (
    CacheSpecs,
    KvSpec,
    LayerCache,
    StateSpec,
    enter_states,
    leave_states,
)
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.step_inputs import DeviceInputs
from moebius_worker.engine.types import Slice, StateStep

# More launches than those of so many steps do not fit into a GPU's queue.
STEPS, PAGE, VOCAB = 12, 16, 1000
# Cycles: about a third of a second.
BUSY = 500_000_000


def _slices(draw: random.Random) -> list[Slice]:
    lengths = [draw.choice((1, 1, 40, 700)) for _ in range(4)]
    return [
        Slice(
            index,
            tuple(draw.choices(range(VOCAB), k=length)),
            start := draw.randrange(300),
            tuple(draw.sample(range(500), -(-(start + length) // PAGE))),
            sample=draw.random() < 0.7,
            state=StateStep(index, save=4 + index),
        )
        for index, length in enumerate(lengths)
    ]


def _copied(context: StepContext) -> list[torch.Tensor]:
    plan, states = context.attention[None], context.states
    found = [context.token_ids, context.positions, context.sampled, plan.slots]
    found += [plan.first_rows, plan.num_keys, plan.tiles]  # type: ignore[union-attr]
    found += [states.rows, states.slots, states.spans, states.chunks]  # type: ignore[union-attr]
    return [part.clone() for part in found]


def _steps(device: torch.device) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """What the inputs of steps said, and a state that they left, all on `device`."""
    specs = CacheSpecs()
    specs.add(KvSpec(kv_heads=1, key_dim=16, value_dim=16))
    specs.add(StateSpec({"memory": (2,)}, {}))
    made = DeviceInputs(
        specs,
        (),
        CacheLayout(PAGE, 500, state_slots=8),
        Place(device, torch.bfloat16),
        vocab_size=VOCAB,
        max_requests=4,
        max_rows=2800,
        max_model_len=1024,
    )
    memory = torch.zeros(8, 2, device=device)
    caches = [LayerCache({"memory": memory}, None)]
    draw, found = random.Random(3), []
    for step in range(STEPS):
        slices = _slices(draw)
        states = [(piece.state, draw.choice((0, 1))) for piece in slices if piece.state is not None]
        enter_states(caches, states)
        memory[:4] += step
        found.append(_copied(made.context(slices)))
        leave_states(caches, [state for state, _ in states])
    return found, memory


def check(device: torch.device) -> None:
    busy = True
    # The first time kernels are loaded, and memory is made that copies under way do not give back yet.
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY)
        found, memory = _steps(device)
        if device.type == "cuda":
            busy = not torch.cuda.current_stream().query()
    expected, expected_memory = _steps(torch.device("cpu"))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, theirs, strict=True))
    assert torch.equal(memory.cpu(), expected_memory)
    assert busy, "somebody waited for the GPU"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
def test_inputs_of_many_steps_queue_behind_a_busy_gpu() -> None:
    check(torch.device("cuda"))
