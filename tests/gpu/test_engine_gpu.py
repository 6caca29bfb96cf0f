"""The engine on a GPU says what it says on a CPU: each family, with kernels, with and without CUDA graphs."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius_kernels.calls import CALLS, named_arguments, shapes_of
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations
from moebius_kernels.registry import Backend, Device, Query, TokenRange, gather, refusal
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep
from moebius_worker.preflight.machine import device_here
from tests.gpu.gpu_models import CHECKPOINTS, TINY_MODELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

STEPS = ((37, 20), (1, 1), (1, 1), (9, 1), (1, 1), (1, 1))
MOST_TOKENS = 64


def triton() -> Operations:
    """For each call the first of our own kernels that admits it, whatever a preflight would find."""
    registry, device = gather(["moebius_kernels.triton"]), device_here("cuda")
    return Operations(**{name: _own(registry.of(name), device) for name in OPERATION_NAMES})


def _own(backends: tuple[Backend, ...], device: Device) -> Callable[..., Any]:
    reference, *own = backends
    operation = reference.operation
    if not own:
        return reference.function
    known: dict[Hashable, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        site = CALLS[operation].site(*args, **kwargs)
        if site not in known:
            shapes = shapes_of(operation, named_arguments(operation, args, kwargs))
            query = Query(operation, shapes, TokenRange(1, MOST_TOKENS), device)
            refusals = {one: refusal(one, query) for one in own}
            admitted = [one for one, reason in refusals.items() if reason is None]
            assert admitted, f"{operation} {query.key}: {list(refusals.values())}"
            known[site] = admitted[0].bind()
        return known[site](*args, **kwargs)

    return call


def load(path: Path, device: str, dtype: str = "bfloat16", max_running: int = 4) -> ModelRunner:
    options = RunnerOptions(
        device=device,
        dtype=dtype,
        kv_cache_bytes=4 << 20,
        expand_weights=device == "cpu",
        max_running=max_running,
        max_step_tokens=MOST_TOKENS,
        max_model_len=128,
    )
    return ModelRunner.load(open_checkpoint(str(path)), options)


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Two texts, prefilled and decoded side by side."""
    pages = [tuple(range(i * 8, i * 8 + 8)) for i in range(2)]
    done, rows = [0, 0], []
    for counts in STEPS:
        slices = []
        for index, count in enumerate(counts):
            start = done[index]
            ids = tuple((7 + index + 13 * at) % runner.vocab_size for at in range(start, start + count))
            slices.append(
                Slice(
                    index,
                    ids,
                    start,
                    pages[index],
                    sample=True,
                    window_pages=pages[index] if runner.layout.window is not None else (),
                    state=StateStep(index) if runner.layout.state_slots else None,
                )
            )
            done[index] += count
        computed = runner.step(slices)
        assert not computed.faulty()
        rows.append(computed.logits.float().cpu())
    return torch.stack(rows)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_the_cpus(tmp_path: Path, name: str) -> None:
    path = TINY_MODELS[name](tmp_path)
    expected = logits_of(load(path, "cpu", "float32"))
    # bf16 on one side; a router may send a token elsewhere. Some models with random weights are so unsteady
    # that bf16 alone changes much. Of FP8, activations may be rounded too.
    limit = max(0.15 if "fp8" in name.lower() else 0.1, 2 * distance(logits_of(load(path, "cpu")), expected))
    for operations, graphs in ((REFERENCE, False), (triton(), False), (triton(), True)):
        runner = load(path, "cuda")
        runner.bind(operations)
        if graphs:
            runner.capture(lambda size: size <= 4, lambda *_: None)
        found = logits_of(runner)
        error = distance(found, expected)
        print(name, operations is REFERENCE, graphs, f"{error:.3f} of {limit:.3f}")
        assert error < limit, "graphs" if graphs else "eager"
        del runner


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of most rows, relative to how far logits lie apart."""
    return float(((found - expected).abs().amax(-1) / expected.std()).median())


# Keys and values; some of a window; one latent a position; states.
@pytest.mark.parametrize("name", ["qwen3_moe-nvfp4-modelopt", "gpt_oss-mxfp4", "deepseek_v2", "qwen3_next"])
def test_graphs_equal_eager_for_every_size(tmp_path: Path, name: str) -> None:
    path, most = TINY_MODELS[name](tmp_path), 64
    eager, captured = (load(path, "cuda", max_running=most) for _ in range(2))
    for runner in (eager, captured):
        runner.bind(triton())
    captured.capture(lambda size: True, lambda *_: None)
    sizes = captured._graphs._sizes
    assert sizes[-1] == most
    texts = [_Text(number, 1 + number % 7) for number in range(most)]
    for first in range(0, most, 8):
        slices = [text.slice(eager, text.length) for text in texts[first : first + 8]]
        assert torch.equal(eager.step(slices).logits, captured.step(slices).logits)
    different = {}
    for size in sizes:
        slices = [text.slice(eager, 1) for text in texts[:size]]
        expected, found = eager.step(slices).logits, captured.step(slices).logits
        if not torch.equal(expected, found):
            different[size] = float((expected - found).abs().max())
    assert not different


class _Text:
    """Grows with each slice of it, on a page of its own."""

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length, self.done = number, length, 0

    def slice(self, runner: ModelRunner, count: int) -> Slice:
        start, self.done = self.done, self.done + count
        pages = (2 * self.number, 2 * self.number + 1)
        return Slice(
            self.number,
            tuple((5 + self.number + 11 * at) % runner.vocab_size for at in range(start, self.done)),
            start,
            pages,
            sample=True,
            window_pages=pages if runner.layout.window is not None else (),
            state=StateStep(self.number) if runner.layout.state_slots else None,
        )


def _beginnings(runner: ModelRunner, count: int) -> list[Slice]:
    """So many requests of one token."""
    windowed = runner.layout.window is not None
    return [
        Slice(
            number,
            (5 + number,),
            0,
            (number,),
            sample=True,
            window_pages=(number,) if windowed else (),
            state=StateStep(number) if runner.layout.state_slots else None,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_rows_that_fill_a_graph_up_change_nothing(path: Path) -> None:
    eager, captured = (load(path, "cuda", max_running=12) for _ in range(2))
    for runner in (eager, captured):
        runner.bind(triton())
    captured.capture(lambda size: size == 12, lambda *_: None)
    for count in (12, 9, 11):
        expected = eager.step(_beginnings(eager, count)).logits
        found = captured.step(_beginnings(captured, count)).logits
        assert found.shape == expected.shape
        assert distance(found, expected) < 0.1


def test_a_graphs_rows_that_are_not_finite_show_in_their_logits_alone() -> None:
    [path] = [path for path in CHECKPOINTS if path.name.startswith("qwen3_moe-")][:1]
    runner = load(path, "cuda")
    runner.bind(triton())
    runner.capture(lambda size: size == 2, lambda *_: None)
    runner._model.embedding.data[5] = float("nan")
    computed = runner.step(_beginnings(runner, 2))
    assert not computed.faulty()
    assert computed.logits[0].isnan().all()
    # The head may be the embedding, with the same row.
    assert computed.logits[1, 6:].isfinite().all()
    # Nobody looks at the logits of a row that is not sampled.
    first, second = _beginnings(runner, 2)
    for slices in ([first._replace(sample=False), second], [first, second._replace(sample=False)]):
        assert runner.step(slices).faulty() == {first.handle}
