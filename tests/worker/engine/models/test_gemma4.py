"""Gemma 4 against transformers: dense, with experts, with inputs for each layer, and out of a wrapper."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
)

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from tests.tiny import VOCAB_SIZE
from tests.worker.engine.models.harness import (
    TOLERANCE,
    Texts,
    check_bf16,
    check_family,
    check_mixed_batches,
    check_one_piece,
    load,
    write_random,
)

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 7,
    "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
LAYER_INPUTS = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
CASES: dict[str, dict[str, Any]] = {"dense": {}, "moe": MOE, "layer_inputs": LAYER_INPUTS}
SCALES = {"per_expert_scale": 1.0, "router.scale": 1.0, "router.proj": 0.5}


def text_model(**config: Any) -> Gemma4ForCausalLM:
    torch.manual_seed(0)
    return Gemma4ForCausalLM(Gemma4TextConfig(**(SIZES | config)))


def vary_scalars(model: torch.nn.Module) -> None:
    """They are buffers, which `write_random` leaves as they are."""
    for index, layer in enumerate(model.get_submodule("model.layers")):
        layer.layer_scalar.fill_(0.8 + 0.1 * index)


def write(path: Path, model: Gemma4ForCausalLM) -> Path:
    vary_scalars(model)
    return write_random(path, model, scales=SCALES)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = text_model(**CASES[case])
    check_family(write(tmp_path, model), model)


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_as_exact_as_in_transformers(tmp_path: Path, case: str) -> None:
    model = text_model(**CASES[case])
    check_bf16(write(tmp_path, model), model)


def test_the_older_form_of_the_config(tmp_path: Path) -> None:
    """Published checkpoints say what is different in full layers without `per_layer_config`."""
    model = text_model(**MOE)
    path = write(tmp_path, model)
    config = json.loads((path / "config.json").read_text())
    del config["per_layer_config"], config["rope_parameters"], config["tie_word_embeddings"]
    config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (path / "config.json").write_text(json.dumps(config))
    check_one_piece(load(path), model.eval())


def test_a_multimodal_checkpoint_is_served_for_its_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    config = Gemma4Config(text_config=SIZES | MOE, vision_config=vision, image_token_id=380)
    whole = Gemma4ForConditionalGeneration(config)
    path = write_random(tmp_path, whole, scales=SCALES)
    text = text_model(**MOE).eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    runner = load(path)
    check_one_piece(runner, text)
    check_mixed_batches(runner, text)


def test_left_over_keys_and_values_of_sharing_layers_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = text_model(**LAYER_INPUTS)
    path = write(tmp_path, model)
    tensors = load_file(path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.ones(3)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    check_one_piece(load(path), model.eval())


PARTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "layer_scalar": ("dense", torch.ones_like),
    "q_norm": ("dense", torch.ones_like),
    "k_norm": ("dense", torch.ones_like),
    "input_layernorm": ("dense", torch.ones_like),
    "post_attention_layernorm": ("dense", torch.ones_like),
    "pre_feedforward_layernorm": ("dense", torch.ones_like),
    "post_feedforward_layernorm": ("dense", torch.ones_like),
    "pre_feedforward_layernorm_2": ("moe", torch.ones_like),
    "post_feedforward_layernorm_1": ("moe", torch.ones_like),
    "post_feedforward_layernorm_2": ("moe", torch.ones_like),
    "router.scale": ("moe", torch.ones_like),
    "router.proj": ("moe", torch.zeros_like),
    "per_expert_scale": ("moe", torch.ones_like),
    "embed_tokens_per_layer": ("layer_inputs", torch.zeros_like),
    "per_layer_model_projection": ("layer_inputs", torch.zeros_like),
    "per_layer_projection_norm": ("layer_inputs", torch.ones_like),
    "per_layer_input_gate": ("layer_inputs", torch.zeros_like),
    "post_per_layer_input_norm": ("layer_inputs", torch.ones_like),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_small_part_shows_in_the_logits(tmp_path: Path, part: str) -> None:
    """Else the comparisons above would not notice that it is left out."""
    case, neutral = PARTS[part]
    model = text_model(**CASES[case]).eval()
    runner = load(write(tmp_path, model))
    changed = 0
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if f".{part}." in f"{name}.":
                tensor.copy_(neutral(tensor))
                changed += 1
    assert changed
    assert Texts(runner, model, [37]).step({0: 37}) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        {"final_logit_softcapping": None},
        {"sliding_window": 8},
        {"layer_types": [SLIDING, FULL, FULL, FULL], "global_head_dim": 16},
        {"rope_parameters": ROPE | {FULL: ROPE[FULL] | {"partial_rotary_factor": 0.5}}},
        {"rope_parameters": ROPE | {FULL: ROPE[FULL] | {"rope_type": "default"}}},
        {"rope_parameters": ROPE | {SLIDING: ROPE[FULL]}},
    ],
    ids=str,
)
def test_every_setting_shows_in_the_logits(tmp_path: Path, other: dict[str, Any]) -> None:
    model = text_model(global_head_dim=16)
    runner = load(write(tmp_path, model))
    different = text_model(**({"global_head_dim": 16} | other)).eval()
    different.load_state_dict(model.state_dict())
    assert Texts(runner, different, [37]).step({0: 37}) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "'silu'"),
        ({"layer_types": [SLIDING, "chunked_attention", SLIDING, FULL]}, "chunked_attention"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves no 'full_attention'"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e6}}}, "rope_parameters say nothing"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input = 100",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], message: str) -> None:
    config = text_model().config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]} | changes
    with pytest.raises(CheckpointError, match=message):
        build_model(config, Place(torch.device("cpu"), torch.float32))
