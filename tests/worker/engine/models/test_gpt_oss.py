"""gpt-oss against transformers: in floating point, in OpenAI's MXFP4 and in ModelOpt's NVFP4."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from tests.tiny import VOCAB_SIZE
from tests.worker.engine.models.harness import (
    TOLERANCE,
    Texts,
    check_bf16,
    check_chunks,
    check_family,
    check_mixed_batches,
    check_one_piece,
    load,
    write_random,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    # Low enough for the clamp to matter with weights as small as these.
    "swiglu_limit": 1.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SCALES = {"sinks": 1.0, "router": 0.5, "bias": 0.5}
# E2M1, by code (OCP Microscaling Formats v1.0).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make(**config: Any) -> GptOssForCausalLM:
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**(SIZES | config)))


def write(path: Path, model: GptOssForCausalLM) -> Path:
    return write_random(path, model, scales=SCALES)


def test_logits_and_greedy_text_are_those_of_transformers(tmp_path: Path) -> None:
    model = make()
    check_family(write(tmp_path, model), model)


def test_bf16_is_as_exact_as_in_transformers(tmp_path: Path) -> None:
    model = make()
    check_bf16(write(tmp_path, model), model)


def test_the_older_form_of_the_config(tmp_path: Path) -> None:
    model = make(swiglu_limit=7.0)
    path = write(tmp_path, model)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 3}
    for key in ("layer_types", "swiglu_alpha", "swiglu_limit"):
        del config[key]
    (path / "config.json").write_text(json.dumps(config))
    check_one_piece(load(path), model.eval())


def to_mxfp4(path: Path, model: GptOssForCausalLM) -> None:
    """Replaces the experts of the checkpoint by random MXFP4, as OpenAI stores it, and those of the model."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            stored = f"model.layers.{index}.mlp.experts.{name}"
            experts, columns, rows = tensors.pop(stored).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator).byte()
            scales = torch.randint(122, 126, shape, generator=generator).byte()
            tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
            nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
            values = E2M1[nibbles] * 2.0 ** (scales.float() - 127).unsqueeze(-1)
            parameter = getattr(layer.mlp.experts, name)
            parameter.data.copy_(values.flatten(-2).transpose(1, 2))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (path / "config.json").write_text(json.dumps(config))


def to_nvfp4(path: Path, model: GptOssForCausalLM) -> None:
    """Replaces the experts by random NVFP4 as ModelOpt stores them, inputs first, and those of the model."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        for number, name in enumerate(("gate_up_proj", "down_proj")):
            stored = f"model.layers.{index}.mlp.experts.{name}"
            experts, columns, rows = tensors.pop(stored).shape
            codes = torch.randint(256, (experts, columns // 2, rows), generator=generator).byte()
            scales = (torch.rand((experts, columns // 16, rows), generator=generator) + 1).to(
                torch.float8_e4m3fn
            )
            factor = torch.tensor(0.05 + 0.01 * number)
            tensors |= {
                stored: codes,
                f"{stored}_weight_scale": scales,
                f"{stored}_weight_scale_2": factor,
                f"{stored}_input_scale": torch.tensor(0.1),
            }
            nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2).long()
            values = E2M1[nibbles] * (scales.float() * factor).repeat_interleave(16, dim=1)
            getattr(layer.mlp.experts, name).data.copy_(values)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    left_out = ["model.layers.*.self_attn*", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left_out}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("quantise", [to_mxfp4, to_nvfp4])
def test_quantised_experts_are_as_in_transformers_with_the_same_numbers(
    tmp_path: Path, quantise: Callable[[Path, GptOssForCausalLM], None], expand: bool
) -> None:
    model = make().eval()
    path = write(tmp_path, model)
    quantise(path, model)
    runner = load(path, expand_weights=expand)
    check_one_piece(runner, model)
    check_chunks(runner, model)
    check_mixed_batches(runner, model)


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sinks": lambda tensor: torch.full_like(tensor, -1e9),
    "router.weight": torch.zeros_like,
    "router.bias": torch.zeros_like,
    "gate_up_proj_bias": torch.zeros_like,
    "down_proj_bias": torch.zeros_like,
    "q_proj.bias": torch.zeros_like,
    "k_proj.bias": torch.zeros_like,
    "v_proj.bias": torch.zeros_like,
    "o_proj.bias": torch.zeros_like,
    "input_layernorm": torch.ones_like,
    "post_attention_layernorm": torch.ones_like,
}


@pytest.mark.parametrize("part", PARTS)
def test_every_small_part_shows_in_the_logits(tmp_path: Path, part: str) -> None:
    """Else the comparisons above would not notice that it is left out."""
    model = make().eval()
    runner = load(write(tmp_path, model))
    changed = 0
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if f".{part}." in f".{name}.":
                tensor.copy_(PARTS[part](tensor))
                changed += 1
    assert changed
    assert Texts(runner, model, [37]).step({0: 37}) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        {"swiglu_limit": 7.0},
        {"swiglu_alpha": 1.0},
        {"sliding_window": 8},
        {"rope_parameters": SIZES["rope_parameters"] | {"truncate": True}},
        {"rope_parameters": SIZES["rope_parameters"] | {"attention_factor": 1.0}},
    ],
    ids=str,
)
def test_every_setting_shows_in_the_logits(tmp_path: Path, other: dict[str, Any]) -> None:
    model = make()
    runner = load(write(tmp_path, model))
    different = make(**other).eval()
    different.load_state_dict(model.state_dict())
    assert Texts(runner, different, [37]).step({0: 37}) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "4 times"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_experts_per_tok": 9}, "9 experts"),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], message: str) -> None:
    config = make().config.to_dict() | {"architectures": ["GptOssForCausalLM"]} | changes
    with pytest.raises(CheckpointError, match=message):
        build_model(config, Place(torch.device("cpu"), torch.float32))
