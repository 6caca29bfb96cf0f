"""Dummy weights: every form, of the deviation that is wanted, and a model that computes with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from moebius_kernels.operations import REFERENCE
from moebius_kernels.router import Route
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.models.parameters import Matrix
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice
from moebius_worker.engine.weights.dummy import FORMS, DummyWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("columns", [256, 1024])
def test_the_numbers_are_as_large_as_they_should_be(name: str, columns: int) -> None:
    slots = {"layer.up_proj.weight": Matrix({"up_proj": 256}, columns).slot("up_proj")}
    weights = DummyWeights(slots, FORMS[name], CPU)
    form = weights.form("layer.up_proj.weight", weights.tensors)
    values = form.read(weights.read).dequantize()
    assert form.format == FORMS[name]
    # MXFP4's scales are powers of two.
    assert values.std() == pytest.approx(columns**-0.5, rel=0.5 if name == "mxfp4" else 0.1)
    assert values.mean().abs() < 0.02 * values.std()


def load(path: Path, form: str, **changed: int) -> ModelRunner:
    sizes = {
        "vocab_size": 384,
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    }
    config = Qwen3MoeConfig(**(sizes | changed)).to_dict()
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    options = RunnerOptions(dummy_weights=form, expand_weights=False, kv_cache_bytes=1 << 23)
    return ModelRunner.load(open_checkpoint(str(path)), options)


@pytest.mark.parametrize("name", FORMS)
def test_a_model_of_true_form_without_weights(name: str, tmp_path: Path) -> None:
    runner = load(tmp_path, name)
    logits = runner.step([Slice(0, tuple(range(40)), 0, (0, 1, 2), sample=True)]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.01


@pytest.mark.parametrize("name", FORMS)
def test_whole_layers_are_filled_as_single_tensors_are(name: str, tmp_path: Path) -> None:
    """In place, each expert with numbers of its own, and as large."""
    runner = load(tmp_path, name)
    model = runner._model
    for matrix in {slot.owner for slot in model.slots().values() if isinstance(slot.owner, Matrix)}:
        for part in matrix.parts:
            values = matrix.destination(part, 0).dequantize()
            rel = 0.5 if name == "mxfp4" else 0.15
            assert any(
                values.std() == pytest.approx(std, rel=rel)
                for std in (matrix.columns**-0.5, 1.0, 0.002, 0.005)
            )
            if matrix.experts is not None:
                assert not torch.equal(values, matrix.destination(part, 1).dequantize())


@pytest.mark.parametrize("form", FORMS)
def test_a_prompts_tokens_go_to_all_experts_in_every_layer(tmp_path: Path, form: str) -> None:
    runner = load(tmp_path, form, num_hidden_layers=8, num_key_value_heads=1, head_dim=32, vocab_size=4096)
    loads: list[float] = []

    def watched(*args: Any, **options: Any) -> Route:
        route = REFERENCE.topk_softmax(*args, **options)
        counts = route.experts.flatten().bincount(minlength=16)
        loads.append(float(counts.max() / counts.float().mean()))
        return route

    runner.bind(replace(REFERENCE, topk_softmax=watched))
    ids = torch.randint(0, 4096, (384,), generator=torch.Generator().manual_seed(0))
    runner.step([Slice(0, tuple(ids.tolist()), 0, tuple(range(24)), sample=True)])
    assert len(loads) == 8
    assert max(loads) < 2
