"""Qwen3.5 and 3.6, dense and with experts, against transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.worker.engine.models.harness import (
    check_bf16,
    check_chunks,
    check_family,
    check_one_piece,
    load,
    write_random,
)
from tests.worker.engine.models.qwen_world import EXPERTS, SCALES, SIZES, VISION

CASES = {
    "as many key heads as value heads": {"linear_num_key_heads": 9},
    "biases": {"attention_bias": True},
    "types from the interval": {"layer_types": None, "full_attention_interval": 2},
    "a longer convolution": {"linear_conv_kernel_dim": 6},
}


def dense(path, scales=SCALES, **config):
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(SIZES | config)))
    return write_random(path, model, scales=scales), model.eval()


def sparse(path, **config):
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(SIZES | EXPERTS | config)))
    return write_random(path, model, scales=SCALES), model.eval()


def edit_config(path: Path, change) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def test_dense(tmp_path):
    check_family(*dense(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_variants(tmp_path, case):
    path, model = dense(tmp_path, **CASES[case])
    check_chunks(load(path), model)


def test_tied(tmp_path):
    # The head is the embedding, whose scale would make the logits large.
    path, model = dense(tmp_path, scales=SCALES | {"embed": 0.15}, tie_word_embeddings=True)
    check_chunks(load(path), model)


def test_dense_bf16(tmp_path):
    check_bf16(*dense(tmp_path))


def test_experts(tmp_path):
    path, model = sparse(tmp_path)
    # As the published text-only checkpoints have them.
    assert any(".experts.6.up_proj." in name for name in load_file(path / "model.safetensors"))
    check_family(path, model)


def test_experts_bf16(tmp_path):
    check_bf16(*sparse(tmp_path))


def multimodal(path):
    config = Qwen3_5MoeConfig(text_config=SIZES | EXPERTS, vision_config=VISION)
    model = Qwen3_5MoeForConditionalGeneration(config)
    path = write_random(path, model, scales=SCALES)
    tensors = load_file(path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    return path, model.eval(), tensors


def test_multimodal_checkpoint_is_served_text_only(tmp_path):
    path, model, _ = multimodal(tmp_path)
    check_family(path, model)


def test_dense_multimodal_checkpoint(tmp_path):
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=SIZES, vision_config=VISION))
    path = write_random(tmp_path, model, scales=SCALES)
    check_chunks(load(path), model.eval())


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_models_word_on_a_tied_head_goes_first(tmp_path, tied):
    text = SIZES | {"tie_word_embeddings": not tied}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(config)
    path = write_random(tmp_path, model, scales=SCALES | {"embed": 0.15})
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) is not tied
    check_one_piece(load(path), model.eval())


def test_fused_experts(tmp_path):
    """As the published multimodal checkpoints have them."""
    path, model, tensors = multimodal(tmp_path)
    single = [name for name in tensors if ".mlp.experts." in name]
    for index, layer in enumerate(model.model.language_model.layers):
        prefix = f"model.language_model.layers.{index}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"] = layer.mlp.experts.gate_up_proj.detach()
        tensors[f"{prefix}.down_proj"] = layer.mlp.experts.down_proj.detach()
    save_file({name: tensors[name] for name in tensors.keys() - set(single)}, path / "model.safetensors")
    check_chunks(load(path), model)


def test_layers_that_guess_tokens_are_left_out(tmp_path):
    path, model = sparse(tmp_path)
    tensors = load_file(path / "model.safetensors")
    names = ("fc.weight", "layers.0.mlp.experts.0.up_proj.weight", "layers.0.mlp.experts.gate_up_proj")
    tensors |= {f"mtp.{name}": torch.ones(3, 3) for name in names}
    save_file(tensors, path / "model.safetensors")
    check_one_piece(load(path), model.eval())


def test_old_keys_of_the_config(tmp_path):
    path, model = sparse(tmp_path)

    def old(config):
        rope = config.pop("rope_parameters")
        config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
        if "num_experts" in config:
            config["num_local_experts"] = config.pop("num_experts")
        else:
            config["num_experts"] = config.pop("num_local_experts")

    edit_config(path, old)
    check_one_piece(load(path), model.eval())


def test_a_quarter_of_a_head_turns_unless_the_config_says_otherwise(tmp_path):
    path, model = dense(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=32)
    edit_config(path, lambda config: config["rope_parameters"].pop("partial_rotary_factor", None))
    check_one_piece(load(path), model.eval())
