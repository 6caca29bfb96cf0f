"""Real checkpoints under examination: one layer of each kind, and every call that the engine will make."""

from pathlib import Path

import pytest
import torch

from moebius_kernels.activations import Activation
from moebius_kernels.calls import key_of, named_arguments, shapes_of
from moebius_kernels.dispatch import bind
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations
from moebius_kernels.plan import Plan, token_ranges
from moebius_kernels.registry import Backend, Registry, references
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.models.kinds import SkippedLayer, keep_kinds
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep
from moebius_worker.engine.weights.load import plan_loading
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.preflight.draw import draw_plan
from moebius_worker.preflight.model import open_subject
from moebius_worker.preflight.probe import Probe
from moebius_worker.preflight.report import Judged, Message
from moebius_worker.preflight.run import Examination, preflight
from moebius_worker.preflight.subject import steps_for
from tests.tiny import write_checkpoint
from tests.worker.engine.models import qwen_world
from tests.worker.engine.models.harness import write_random

DATA = Path(__file__).parents[2] / "data" / "checkpoints"
RANGES = token_ranges(8)
STEPS = steps_for(RANGES, max_running=4, max_step_tokens=8)
OPTIONS = {
    "device": "cpu",
    "dtype": "auto",
    "page_size": 4,
    "kv_format": "model",
    "threads": 1,
    "expand_weights": None,
    "dummy_weights": None,
    "max_running": 4,
    "max_step_tokens": 8,
}


def _explicit_silu(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """An implementation of its own, for CPUs."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def registry() -> Registry:
    explicit = Backend(
        "gated",
        "explicit",
        _explicit_silu,
        devices=("cpu",),
        admits=lambda query: (
            None if query.arguments["activation"] == {"kind": "Silu"} else "computes SiLU alone"
        ),
    )
    return Registry((*references(), explicit), {})


def _copies() -> Registry:
    """The references once more, as candidates."""
    copies = (Backend(one.operation, "copy", one.function, devices=("cpu",)) for one in references())
    return Registry((*references(), *copies), {})


@pytest.fixture(scope="module")
def qwen_next(tmp_path_factory) -> Path:
    """Three layers of linear attention, one of full attention, one of linear attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {name: size for name, size in qwen_world.SIZES.items() if name != "rope_parameters"}
    config = Qwen3NextConfig(**sizes, **qwen_world.EXPERTS, decoder_sparse_step=1)
    path = tmp_path_factory.mktemp("qwen3-next")
    return write_random(path, Qwen3NextForCausalLM(config), scales=qwen_world.SCALES)


def _kept(path: Path) -> tuple[list[bool], float]:
    """Which layers are kept, and what part of the bytes is loaded."""
    checkpoint = open_checkpoint(str(path))
    place = Place(torch.device("meta"), torch.float32)
    model = build_model(checkpoint.config, place)
    reader, scheme = open_weights(checkpoint, model.LAYOUT)
    loading = plan_loading(reader, scheme, model.slots(), model.ignores, dtype=torch.float32, expand=False)
    loading.allocate(place)
    whole = loading.nbytes
    part = keep_kinds(model, loading).nbytes
    return [not isinstance(layer, SkippedLayer) for layer in model.layers], part / whole


def test_one_layer_of_each_kind_is_kept(qwen_next: Path, tmp_path: Path) -> None:
    kept, share = _kept(qwen_next)
    assert kept == [True, False, False, True, False]
    assert share < 1
    kept, _ = _kept(write_checkpoint(tmp_path, num_hidden_layers=4))
    assert kept == [True, False, False, False]


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "gemma4_moe-nvfp4-modelopt"])
def test_a_model_may_make_its_calls_in_a_few_layers_for_a_while(name: str) -> None:
    options = RunnerOptions(device="cpu", page_size=4, kv_cache_bytes=1 << 20, threads=1)
    runner = ModelRunner.load(open_checkpoint(str(DATA / name)), options)
    calls: list[str] = []

    def noting(operation: str):
        def call(*args, **kwargs):
            arguments = named_arguments(operation, args, kwargs)
            calls.append(f"{operation} {key_of(shapes_of(operation, arguments))}")
            return getattr(REFERENCE, operation)(*args, **kwargs)

        return call

    runner.bind(Operations(**{operation: noting(operation) for operation in OPERATION_NAMES}))
    step = [Slice(1, (5, 6, 7), 0, (0, 1), True, window_pages=(0, 1))]
    whole, all_calls = runner.step(step).logits, list(calls)
    calls.clear()
    with runner.one_layer_of_each_kind():
        runner.step(step)
    assert set(calls) == set(all_calls)
    assert len(calls) < len(all_calls)
    torch.testing.assert_close(runner.step(step).logits, whole, rtol=0, atol=0)


def test_kinds_differ_in_windows_and_in_the_forms_of_weights() -> None:
    # Windows alternate.
    kept, _ = _kept(DATA / "gpt_oss-mxfp4")
    assert kept[:2] == [True, True]
    assert not any(kept[2:])
    kept, _ = _kept(DATA / "gemma4_moe-nvfp4-modelopt")
    assert kept.count(True) >= 2


def _examine(path: Path, **options: object) -> tuple[list[Message], Plan]:
    messages: list[Message] = []
    subject = open_subject(str(path), **OPTIONS | options)
    probe = Probe(_copies(), RANGES, subject.device, subject.machine, messages.append)
    subject.bind(probe.operations())
    for step in STEPS:
        probe.kind = step.kind
        subject.run(step)
    verdicts = {(one.site, one.verdict.backend): one.verdict for one in messages if isinstance(one, Judged)}
    return messages, draw_plan(verdicts, RANGES, capture_tokens=0, identity={})


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "qwen3_moe-NVFP4-ct", "gemma4_moe-nvfp4-modelopt"])
def test_references_agree_with_themselves_whatever_the_family(name: str) -> None:
    """What the gates do to a call (copies, other contents, poison) does not change what it computes."""
    messages, plan = _examine(DATA / name)
    called = {choice.operation for choice in plan.choices}
    assert {"linear", "routed_experts", "add_rms_norm", "paged_attention", "draw_tokens"} <= called
    for message in messages:
        if isinstance(message, Judged) and message.verdict.backend == "copy":
            assert message.verdict.rejected is None, message
            assert message.verdict.error == 0, message
    kinds = {
        message.site.kind
        for message in messages
        if isinstance(message, Judged) and message.site.operation == "paged_attention"
    }
    assert kinds == {"decode", "prefill", "mixed"}


def test_random_weights_in_the_place_of_a_checkpoints_are_examined_too(tmp_path: Path) -> None:
    """What serves to measure speed has to prove itself no less."""
    (tmp_path / "config.json").write_text((DATA / "gpt_oss-mxfp4" / "config.json").read_text())
    _, plan = _examine(tmp_path, dummy_weights="mxfp4", expand_weights=False)
    [experts] = {choice.key for choice in plan.choices if choice.operation == "routed_experts"}
    assert "Mxfp4" in experts


def test_a_whole_model_serves_with_the_plan_and_finds_every_call_in_it(qwen_next: Path) -> None:
    """The calls of the engine are those that were examined: nothing is left to chance, or to compile."""
    plan = preflight(
        Examination(
            subject="moebius_worker.preflight.model:open_subject",
            options={"model": str(qwen_next), **OPTIONS},
            registry=f"{__name__}:registry",
            ranges=RANGES,
            steps=STEPS,
        ),
        {},
    )
    assert {choice.operation for choice in plan.choices} >= {"causal_conv1d", "gated_delta_rule", "gated"}
    verdicts = [one for choice in plan.choices for one in choice.verdicts if one.backend == "explicit"]
    assert verdicts
    assert all(one.rejected is None for one in verdicts)

    unplanned: list[tuple[str, str]] = []
    ops = bind(plan, registry(), unplanned=lambda *call: unplanned.append(call))
    options = RunnerOptions(device="cpu", page_size=4, kv_cache_bytes=1 << 20, max_running=4)
    runner = ModelRunner.load(open_checkpoint(str(qwen_next)), options)
    slices = [
        Slice(number, tuple(range(3, 3 + count)), 0, pages, True, state=StateStep(number))
        for number, (count, pages) in enumerate([(1, (0,)), (6, (1, 2)), (1, (3,))])
    ]
    expected = runner.step(slices).logits
    runner._model.bind(ops)
    found = runner.step(slices).logits
    assert not unplanned
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
