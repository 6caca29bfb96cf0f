"""How evenly experts are used is counted right, and changes nothing that is computed."""

import contextlib
from pathlib import Path

import pytest
import torch

from moebius_kernels.operations import REFERENCE
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.expert_load import ENOUGH, ExpertLoad
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice
from tests.tiny import write_checkpoint

EXPERTS = 4


def routed(load: ExpertLoad, *layers: list[int]) -> None:
    """One step in which the tokens of each layer go to these experts."""
    with load.watched(REFERENCE) as ops:
        for experts in layers:
            logits = torch.zeros(len(experts), EXPERTS)
            logits[torch.arange(len(experts)), torch.tensor(experts)] = 9.0
            ops.softmax_topk(logits, 1)


def test_imbalance_and_idle_experts_of_each_layer() -> None:
    load = ExpertLoad()
    even = [0, 1, 2, 3] * ENOUGH
    uneven = [0] * (3 * ENOUGH) + [1] * ENOUGH
    routed(load, even, uneven)
    use = load.take()
    assert use is not None
    assert use.imbalance == pytest.approx([1.0, 3.0])
    assert use.idle == 2
    assert load.take() is None, "told once"


def test_little_is_gathered_until_it_is_enough() -> None:
    load = ExpertLoad()
    for _ in range(ENOUGH - 1):
        routed(load, [0, 1, 2, 3])
        assert load.take() is None
    routed(load, [0, 1, 2, 3])
    use = load.take()
    assert use is not None
    assert list(use.imbalance) == [1.0]


def test_experts_that_are_none_do_not_count() -> None:
    load = ExpertLoad()
    with load.watched(REFERENCE) as ops:
        route = ops.topk_softmax(torch.eye(EXPERTS).repeat(ENOUGH + 1, 1), 1)
        route.experts[-4:] = -1
    use = load.take()
    assert use is not None
    assert list(use.imbalance) == [1.0]


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    load = ExpertLoad()
    with contextlib.suppress(ArithmeticError), load.watched(REFERENCE) as ops:
        ops.softmax_topk(torch.zeros(1, EXPERTS), 1)
        raise ArithmeticError
    routed(load, [0, 1, 2, 3] * ENOUGH)
    use = load.take()
    assert use is not None
    assert len(use.imbalance) == 1


def test_it_is_due_after_the_interval() -> None:
    assert not ExpertLoad().due()
    load = ExpertLoad(interval=0.0)
    assert load.due()


@pytest.mark.parametrize(("family", "layers"), [("mixtral", 2), ("llama", 0)])
def test_a_model_computes_the_same_and_its_routers_are_all_seen(
    tmp_path: Path, family: str, layers: int
) -> None:
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, family)))
    token_ids = torch.randint(3, 200, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    logits, uses = [], []
    for interval in (0.0, 1e9):
        runner = ModelRunner.load(checkpoint, RunnerOptions(device="cpu", max_step_tokens=512))
        runner._experts = ExpertLoad(interval)
        before = runner._model.ops
        pages = tuple(range(300 // runner.layout.page_size + 1))
        logits.append(runner.step([Slice(1, tuple(token_ids), 0, pages, sample=True)]).logits)
        assert runner._model.ops is before
        uses.append(runner.expert_use())
    assert torch.equal(*logits)
    watched, unwatched = uses
    assert unwatched is None
    assert (len(watched.imbalance) if watched else 0) == layers
    assert watched is None or all(value >= 1 for value in watched.imbalance)
