"""Checkpoints of careless and hostile authors: each ends in one error that says what is wrong, or serves."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.weights.schemes.registry import scheme_of
from tests.tiny import write_checkpoint
from tests.worker.engine.test_published_configs import META, PUBLISHED, published
from tests.worker.engine.test_published_quantisation import four_layers

# What may stand where something else belongs.
VALUES: list[Any] = [
    None,
    "x",
    "",
    -1,
    0,
    1,
    3,
    2.5,
    1e30,
    True,
    [],
    ["x"],
    [None],
    {},
    {"a": 1},
    float("nan"),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_with_any_value_anywhere_is_served_or_refused(name: str) -> None:
    source = random.Random(name)
    config = four_layers(published(name))
    for _ in range(150):
        spoilt = deepcopy(config)
        inner = source.choice([spoilt, spoilt.get("text_config", spoilt)])
        key = source.choice(list(inner))
        if isinstance(inner[key], dict) and inner[key] and source.random() < 0.7:
            inner, key = inner[key], source.choice(list(inner[key]))
        inner[key] = source.choice(VALUES)
        with suppress(CheckpointError):
            build_model(spoilt, META).slots()
            scheme_of(Checkpoint(Path("there"), "safetensors", spoilt, {}, "name"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound"), num_hidden_layers=1)


def load(path: Path) -> ModelRunner:
    return ModelRunner.load(open_checkpoint(str(path)), RunnerOptions(kv_cache_bytes=1 << 20))


NORM, HEAD = "model.norm.weight", "lm_head.weight"
QUERY = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
# What is done to the tensors, what to the config, and what is said.
SPOILT: dict[str, tuple[Callable[[Tensors], Mapping[str, torch.Tensor]], dict[str, Any], str]] = {
    "a dimension too many": (
        lambda have: {f"{QUERY}.weight": have[f"{QUERY}.weight"][None]},
        {},
        r"q_proj\.weight is \[1, 64, 64\] in .*, the model's \[64, 64\]",
    ),
    "a tensor without elements": (
        lambda have: {f"{QUERY}.weight": torch.empty(0, 64)},
        {},
        r"q_proj\.weight is \[0, 64\] in",
    ),
    "truth values": (lambda have: {NORM: have[NORM].bool()}, {}, r"norm\.weight in .* holds BOOL"),
    "complex numbers": (lambda have: {NORM: have[NORM].cfloat()}, {}, r"norm\.weight in .* holds C64"),
    "an expert under two names": (
        lambda have: {
            "model.layers.0.block_sparse_moe.experts.0.gate_proj.weight": have[f"{QUERY}.weight"].clone()
        },
        {},
        r"experts\.0\.\w+\.weight in .* is the same as .*experts\.0\.\w+\.weight in .*: which one",
    ),
    "a head that is tied and another": (
        lambda have: {HEAD: have[HEAD] + 1},
        {"tie_word_embeddings": True},
        r"lm_head\.weight in .* is not model\.embed_tokens\.weight",
    ),
    "a bias that nobody adds": (
        lambda have: {f"{QUERY}.bias": torch.tensor([0.0] * 63 + [1e-9])},
        {},
        r"q_proj\.bias in .* is not 0, but the model has no place for it",
    ),
}


def changed(sound: Path, path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    shutil.copytree(sound, path)
    save_file(load_file(sound / "model.safetensors") | tensors, path / "model.safetensors")
    declared = json.loads((sound / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(declared | config))
    return path


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_wrong_is_said(sound: Path, tmp_path: Path, case: str) -> None:
    tensors, config, message = SPOILT[case]
    spoilt = tensors(load_file(sound / "model.safetensors"))
    with pytest.raises(CheckpointError, match=message):
        load(changed(sound, tmp_path / "spoilt", spoilt, config))


def test_what_says_nothing_new_is_passed_over(sound: Path, tmp_path: Path) -> None:
    """A tied head once more, and the biases of zeros that AutoGPTQ writes."""
    have = load_file(sound / "model.safetensors")
    more = {f"{QUERY}.bias": torch.zeros(64), HEAD: have["model.embed_tokens.weight"].clone()}
    runner = load(changed(sound, tmp_path / "more", more, {"tie_word_embeddings": True}))
    assert runner.vocab_size == 384


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_lists_in_lists_without_an_end(sound: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(sound, tmp_path / "deep")
    (tmp_path / "deep" / file).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=file):
        load(tmp_path / "deep")


@pytest.mark.parametrize("ids", ["2", [[2]], {"a": 1}, 2.5, ["x"]])
def test_ids_that_end_a_text_and_are_none(sound: Path, tmp_path: Path, ids: object) -> None:
    path = changed(sound, tmp_path / "ids", {}, {})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        _ = open_checkpoint(str(path)).eos_token_ids


def test_a_quantisation_of_null_is_none_and_the_older_file_counts(sound: Path, tmp_path: Path) -> None:
    path = changed(sound, tmp_path / "older", {}, {"quantization_config": None})
    # Only the cache of keys and values is quantised.
    (path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config["quantization_config"]["quant_method"] == "modelopt"
    load(path)
    (path / "hf_quant_config.json").write_text('{"quantization": []}')
    with pytest.raises(CheckpointError, match="older declares cannot be understood"):
        open_checkpoint(str(path))
