"""DeepSeek-V3 and V2 against transformers, and what has their experts or attention: GLM-4.x, MiniMax-M2."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
)

from moebius_kernels.kv_pages import KvPages
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
    check_one_piece,
    load,
    write_random,
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"n_routed_experts": 12, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_parameters": YARN,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

DEEPSEEK = (DeepseekV3ForCausalLM, DeepseekV3Config, COMMON | EXPERTS | LATENT)
DEEPSEEK_V2 = (
    DeepseekV2ForCausalLM,
    DeepseekV2Config,
    COMMON | EXPERTS | LATENT | {"topk_method": "group_limited_greedy"},
)
GLM = (
    Glm4MoeForCausalLM,
    Glm4MoeConfig,
    COMMON
    | EXPERTS
    | {
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
        "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5},
    },
)
GLM_LITE = {
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": PLAIN_ROPE,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}
MINIMAX = (
    MiniMaxM2ForCausalLM,
    MiniMaxM2Config,
    COMMON | {"num_local_experts": 12, "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}},
)
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek": DEEPSEEK,
    "deepseek, queries of the input, plain rope": (
        *DEEPSEEK[:2],
        DEEPSEEK[2] | {"q_lora_rank": None, "rope_parameters": PLAIN_ROPE, "rope_interleave": False},
    ),
    "deepseek as Kimi K2": (*DEEPSEEK[:2], DEEPSEEK[2] | {"n_group": 1, "topk_group": 1}),
    "deepseek, biases": (
        *DEEPSEEK[:2],
        DEEPSEEK[2] | {"attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "deepseek v2": DEEPSEEK_V2,
    "deepseek v2 lite": (
        *DEEPSEEK_V2[:2],
        DEEPSEEK_V2[2] | {"topk_method": "greedy", "q_lora_rank": None, "rope_parameters": PLAIN_ROPE},
    ),
    "glm": GLM,
    "glm, no norm": (*GLM[:2], GLM[2] | {"use_qk_norm": False, "attention_bias": False}),
    "glm lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, DEEPSEEK[2] | GLM_LITE),
    "minimax": MINIMAX,
}
SCALES = {"gate.weight": 0.5, "bias": 0.5}


def make(case: str, **config: Any) -> torch.nn.Module:
    model_class, config_class, sizes = CASES[case]
    torch.manual_seed(0)
    model: torch.nn.Module = model_class(config_class(**(sizes | config)))
    return model


def write(path: Path, model: torch.nn.Module) -> Path:
    """The biases of the routers are buffers, which `write_random` leaves as they are."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return write_random(path, model, scales=SCALES)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = make(case)
    check_family(write(tmp_path, model), model)


@pytest.mark.parametrize("case", ["deepseek", "glm", "minimax"])
def test_bf16_is_as_exact_as_in_transformers(tmp_path: Path, case: str) -> None:
    model = make(case)
    check_bf16(write(tmp_path, model), model)


def change_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def test_older_forms_of_the_config(tmp_path: Path) -> None:
    def deepseek(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "topk_method": "noaux_tc"}
        rope["type"] = rope.pop("rope_type")
        del config["rope_interleave"], config["head_dim"]

    def glm(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config["rope_theta"] = 10000

    def minimax(config: dict[str, Any]) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": 10000, "rotary_dim": 8, "use_qk_norm": True, "attn_type_list": [1, 1, 1]}

    for case, change in (("deepseek", deepseek), ("glm", glm), ("minimax", minimax)):
        model = make(case)
        path = write(tmp_path / case, model)
        change_config(path, change)
        check_one_piece(load(path), model.eval())


@pytest.mark.parametrize("case", ["deepseek", "glm"])
def test_the_layers_that_guess_further_tokens_are_left_out(tmp_path: Path, case: str) -> None:
    model = make(case, num_mtp_layers=1).eval()
    path = write(tmp_path, model)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.3.{name}.weight": torch.ones(3) for name in ("eh_proj", "mlp.gate")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    check_one_piece(load(path), model)
    save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.4\.enorm\.weight"):
        load(path)


@pytest.mark.parametrize("expand", [False, True])
def test_fp8_blocks_are_as_in_transformers_with_the_same_numbers(tmp_path: Path, expand: bool) -> None:
    """As DeepSeek publishes them. `kv_b_proj` is expanded in any case: it is read head by head."""
    model = make("deepseek").eval()
    path = write(tmp_path, model)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2 and not name.endswith(("gate.weight", "embed_tokens.weight", "lm_head.weight")):
            # All sizes are below 128: a block a matrix.
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
            expanded = tensors[name].float() * scale
            if ".experts." not in name:
                model.get_parameter(name).data.copy_(expanded)
                continue
            prefix, number, part = re.fullmatch(r"(.*)\.(\d+)\.(\w+)\.weight", name).groups()  # type: ignore[union-attr]
            fused = "down_proj" if part == "down_proj" else "gate_up_proj"
            target = model.get_parameter(f"{prefix}.{fused}").data[int(number)]
            half = {"gate_proj": target[: len(expanded)], "up_proj": target[len(expanded) :]}
            half.get(part, target).copy_(expanded)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def declare(config: dict[str, Any]) -> None:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }

    change_config(path, declare)
    check_chunks(load(path, expand_weights=expand), model)


def test_deepseek_keeps_one_latent_a_position(tmp_path: Path) -> None:
    runner = load(write(tmp_path, make("deepseek")))
    for cache in runner._caches:
        assert isinstance(cache.tensors, KvPages)
        assert cache.tensors.keys.numbers.shape[2:] == (1, 24 + 8)
        assert cache.tensors.values is None


PARTS: dict[str, str] = {
    "e_score_correction_bias": "deepseek glm minimax",
    "gate": "deepseek glm minimax",
    "q_norm": "glm minimax",
    "k_norm": "glm minimax",
    "q_proj.bias": "glm",
    "k_proj.bias": "glm",
    "v_proj.bias": "glm",
    "shared_experts.down_proj": "deepseek glm",
    "q_a_layernorm": "deepseek",
    "kv_a_layernorm": "deepseek",
}


@pytest.mark.parametrize(
    ("case", "part"), [(case, part) for part, cases in PARTS.items() for case in cases.split()]
)
def test_every_small_part_shows_in_the_logits(tmp_path: Path, case: str, part: str) -> None:
    """Else the comparisons above would not notice that it is left out."""
    model = make(case).eval()
    runner = load(write(tmp_path, model))
    changed = 0
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if f".{part}." in f".{name}.":
                tensor.fill_(1.0 if "norm" in part else 0.0)
                changed += 1
    assert changed
    assert Texts(runner, model, [37]).step({0: 37}) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        {"topk_group": 4},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"rope_interleave": False},
        {"rope_parameters": YARN | {"mscale_all_dim": 1.0}},
        {"rope_parameters": YARN | {"mscale": 1.3}},
    ],
    ids=str,
)
def test_every_setting_shows_in_the_logits(tmp_path: Path, other: dict[str, Any]) -> None:
    model = make("deepseek")
    runner = load(write(tmp_path, model))
    different = make("deepseek", **other).eval()
    different.load_state_dict(model.state_dict())
    assert Texts(runner, different, [37]).step({0: 37}) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("glm lite", {"mlp_layer_types": ["dense", "moe", "dense"]}, "mlp_layer_types"),
        ("deepseek", {"n_group": 5}, "12 experts in 5 groups"),
        ("deepseek", {"kv_lora_rank": None}, "kv_lora_rank = None"),
        ("minimax", {"attn_type_list": [0, 1, 1]}, "attn_type_list"),
        ("minimax", {"use_routing_bias": False}, "use_routing_bias = False"),
    ],
)
def test_what_is_not_implemented_is_refused(case: str, changes: dict[str, Any], message: str) -> None:
    model = make(case)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]} | changes
    with pytest.raises(CheckpointError, match=message):
        build_model(config, Place(torch.device("cpu"), torch.float32))
