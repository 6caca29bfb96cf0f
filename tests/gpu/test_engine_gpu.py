"""The engine on a GPU says what it says on a CPU: each family, with kernels, with and without CUDA graphs."""

from pathlib import Path

import pytest
import torch

from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations
from moebius_kernels.registry import gather
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

CHECKPOINTS = sorted(
    path.parent for path in (Path(__file__).parents[1] / "data" / "checkpoints").glob("*/config.json")
)
GGUF = sorted((Path(__file__).parents[1] / "data" / "gguf").glob("*.gguf"))
STEPS = ((37, 20), (1, 1), (1, 1), (9, 1), (1, 1), (1, 1))


def triton() -> Operations:
    registry = gather()
    chosen = {}
    for name in OPERATION_NAMES:
        functions = {backend.name: backend.function for backend in registry.of(name)}
        chosen[name] = functions.get("triton", functions["reference"])
    return Operations(**chosen)


def load(path: Path, device: str, dtype: str = "bfloat16", max_running: int = 4) -> ModelRunner:
    options = RunnerOptions(
        device=device,
        dtype=dtype,
        kv_cache_bytes=4 << 20,
        expand_weights=device == "cpu",
        max_running=max_running,
        max_step_tokens=64,
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
        assert not computed.faulty
        rows.append(computed.logits.float().cpu())
    return torch.stack(rows)


@pytest.mark.parametrize("path", [*CHECKPOINTS, *GGUF], ids=lambda path: path.name)
def test_logits_are_the_cpus(path: Path) -> None:
    expected = logits_of(load(path, "cpu", "float32"))
    # bf16 on one side; a router may send a token elsewhere. Some models with random weights are so unsteady
    # that bf16 alone changes much.
    limit = max(0.1, 2 * _distance(logits_of(load(path, "cpu")), expected))
    for operations, graphs in ((REFERENCE, False), (triton(), False), (triton(), True)):
        runner = load(path, "cuda")
        runner.bind(operations)
        if graphs:
            runner.capture(lambda size: size <= 4, lambda *_: None)
        found = logits_of(runner)
        error = _distance(found, expected)
        print(path.name, operations is REFERENCE, graphs, f"{error:.3f} of {limit:.3f}")
        assert error < limit, "graphs" if graphs else "eager"
        del runner


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of most rows, relative to how far logits lie apart."""
    return float(((found - expected).abs().amax(-1) / expected.std()).median())


@pytest.mark.parametrize("path", CHECKPOINTS[:2], ids=lambda path: path.name)
def test_graphs_equal_eager_for_every_size(path: Path) -> None:
    eager, captured = load(path, "cuda"), load(path, "cuda")
    for runner in (eager, captured):
        runner.bind(triton())
    captured.capture(lambda size: True, lambda *_: None)
    for count in (1, 2, 3, 4):
        pages = [tuple(range(i * 8, i * 8 + 8)) for i in range(count)]
        windows = pages if eager.layout.window is not None else [()] * count
        slices = [Slice(i, (5 + i,), 0, pages[i], sample=True, window_pages=windows[i]) for i in range(count)]
        assert torch.equal(eager.step(slices).logits, captured.step(slices).logits)


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
        assert _distance(found, expected) < 0.1


def test_a_graphs_rows_that_are_not_finite_show_in_their_logits_alone() -> None:
    [path] = [path for path in CHECKPOINTS if path.name.startswith("qwen3_moe-")][:1]
    runner = load(path, "cuda")
    runner.bind(triton())
    runner.capture(lambda size: size == 2, lambda *_: None)
    runner._model.embedding.data[5] = float("nan")
    computed = runner.step(_beginnings(runner, 2))
    assert not computed.faulty
    assert computed.logits[0].isnan().all()
    # The head may be the embedding, with the same row.
    assert computed.logits[1, 6:].isfinite().all()
