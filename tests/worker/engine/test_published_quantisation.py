"""Quantised checkpoints as they are published: the names, types and shapes in their indices, and no contents.

How tensors are named, and which stay in floating point, is what the publishers' indices and
`quantization_config` say.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.models.parameters import Matrix, Slot
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.weights.layout import lay_out
from moebius_worker.engine.weights.load import plan_loading
from moebius_worker.engine.weights.schemes.registry import scheme_of
from tests.worker.engine.test_published_configs import META, published

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def modelopt_nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
        "input_scale": ("F32", ()),
    }


def compressed_nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_global_scale": ("F32", (1,)),
        "input_global_scale": ("F32", (1,)),
    }


def block_fp8(rows: int, columns: int) -> Tensors:
    blocks = (-(-rows // 128), -(-columns // 128))
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", blocks)}


def static_fp8(rows: int, columns: int) -> Tensors:
    scales: Tensors = {"weight_scale": ("F32", ()), "input_scale": ("F32", ())}
    return {"weight": ("F8_E4M3", (rows, columns)), **scales}


def awq(rows: int, columns: int) -> Tensors:
    groups = columns // 128
    return {
        "qweight": ("I32", (columns, rows // 8)),
        "qzeros": ("I32", (groups, rows // 8)),
        "scales": ("F16", (groups, rows)),
    }


def gptq(rows: int, columns: int) -> Tensors:
    """As AutoGPTQ wrote it: with a bias for every layer, of zeros where the model has none."""
    groups = columns // 128
    return {
        "qweight": ("I32", (columns // 8, rows)),
        "qzeros": ("I32", (groups, rows // 8)),
        "scales": ("F16", (groups, rows)),
        "g_idx": ("I32", (columns,)),
        "bias": ("F16", (rows,)),
    }


@dataclass(frozen=True)
class Release:
    """`plain`: a regular expression of modules that stay in floating point. `rename`: of all names."""

    model: str
    declared: Mapping[str, Any]
    layout: Callable[[int, int], Tensors]
    form: str
    plain: str
    rename: tuple[str, str] = ("", "")
    others: Tensors = field(default_factory=dict)


ROUTERS = r"lm_head|.*embed_tokens|.*\.(gate|router\.proj)"
RELEASES = {
    "nvidia Qwen3-30B-A3B-NVFP4": Release(
        "Qwen3-30B-A3B",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(48))],
        },
        modelopt_nvfp4,
        "nvfp4",
        ROUTERS,
        others={
            "model.layers.0.self_attn.k_proj.k_scale": ("F32", ()),
            "model.layers.0.self_attn.v_proj.v_scale": ("F32", ()),
        },
    ),
    "nvidia Gemma 4 NVFP4, experts alone": Release(
        "gemma-4-26B-A4B-it",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
            "ignore": [
                "lm_head",
                "model.embed_vision*",
                "model.language_model.layers.*.self_attn*",
                "model.language_model.layers.*.mlp*",
                "model.language_model.layers.*.router*",
            ],
        },
        modelopt_nvfp4,
        "nvfp4",
        rf"{ROUTERS}|.*\.(self_attn|mlp)\..*",
        rename=(r"^model\.", "model.language_model."),
        others={"model.vision_tower.patch_embedder.input_proj.weight": ("BF16", (8, 8))},
    ),
    "llm-compressor Qwen3.5 NVFP4": Release(
        "Qwen3.5-35B-A3B",
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
            "config_groups": {
                "group_0": {
                    "format": "nvfp4-pack-quantized",
                    "targets": ["Linear"],
                    "weights": {
                        "type": "float",
                        "num_bits": 4,
                        "group_size": 16,
                        "strategy": "tensor_group",
                        "symmetric": True,
                        "dynamic": False,
                        "actorder": None,
                    },
                }
            },
            "ignore": [
                "lm_head",
                "re:.*visual.*",
                "re:.*mlp.gate$",
                "re:.*mlp.shared_expert_gate$",
                "re:.*linear_attn.*",
                "re:^mtp.*",
            ],
        },
        compressed_nvfp4,
        "nvfp4",
        rf"{ROUTERS}|.*shared_expert_gate|.*linear_attn\..*",
        rename=(r"^model\.", "model.language_model."),
        others={"mtp.fc.weight": ("BF16", (8, 8)), "model.visual.pos_embed.weight": ("BF16", (8, 8))},
    ),
    "Qwen3.5 FP8": Release(
        "Qwen3.5-35B-A3B",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens", "mtp.fc"]
            + [
                f"model.language_model.layers.{n}.linear_attn.{m}"
                for n in range(40)
                for m in ("conv1d", "in_proj_a", "in_proj_b")
            ]
            + [
                f"model.language_model.layers.{n}.mlp.{m}"
                for n in range(40)
                for m in ("gate", "shared_expert_gate")
            ],
        },
        block_fp8,
        "fp8 128x128",
        rf"{ROUTERS}|.*shared_expert_gate|.*linear_attn\.(conv1d|in_proj_[ab])",
        rename=(r"^model\.", "model.language_model."),
    ),
    "DeepSeek-V3": Release(
        "DeepSeek-V3",
        published("DeepSeek-V3")["quantization_config"],
        block_fp8,
        "fp8 128x128",
        ROUTERS,
        others={
            "model.layers.4.eh_proj.weight": ("BF16", (8, 16)),
            "model.layers.4.shared_head.head.weight": ("BF16", (8, 8)),
            "model.layers.4.mlp.experts.0.up_proj.weight_scale_inv": ("F32", (1, 1)),
        },
    ),
    "MiniMax-M2": Release(
        "MiniMax-M2", published("MiniMax-M2")["quantization_config"], block_fp8, "fp8 128x128", ROUTERS
    ),
    "neuralmagic Mixtral FP8": Release(
        "Mixtral-8x7B",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "kv_cache_scheme": "static",
            "ignored_layers": ["lm_head", *(f"model.layers.{n}.block_sparse_moe.gate" for n in range(32))],
        },
        static_fp8,
        "fp8",
        ROUTERS,
        others={
            "model.layers.0.self_attn.kv_scale": ("F32", ()),
            "model.layers.1.self_attn.k_proj.output_scale": ("F32", (1,)),
        },
    ),
    "AutoAWQ Mixtral": Release(
        "Mixtral-8x7B",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["gate"],
        },
        awq,
        "int4 g128 asymmetric",
        ROUTERS,
    ),
    "AutoGPTQ Mixtral": Release(
        "Mixtral-8x7B",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "damp_percent": 0.1,
            "desc_act": False,
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
            "model_name_or_path": None,
            "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"]],
        },
        gptq,
        "int4 g128",
        ROUTERS,
    ),
    "GPTQModel Qwen3-30B-A3B-GPTQ-Int4": Release(
        "Qwen3-30B-A3B",
        {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "lm_head": False,
            "sym": True,
            "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:2.2.0"]},
            "dynamic": {r"-:.*\.mlp\.gate$": {}},
        },
        gptq,
        "int4 g128",
        ROUTERS,
    ),
}


def four_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A full-size model takes long to walk through."""
    short = deepcopy(dict(config))
    text = short.get("text_config", short)
    text["num_hidden_layers"] = 4
    for key in ("layer_types", "attn_type_list"):
        if key in text:
            text[key] = text[key][-4:]
    return short


class Stored:
    """A reader of names alone: nothing can be read."""

    def __init__(self, slots: Mapping[str, Slot], release: Release) -> None:
        stored: Tensors = dict(release.others)
        for name, slot in slots.items():
            module = name.removesuffix(".weight")
            rows, *columns = slot.shape or (1,)
            named = re.sub(*release.rename, name)
            if isinstance(slot.owner, Matrix) and not re.fullmatch(release.plain, module):
                own = release.layout(rows, *columns)
                stored |= {f"{named.removesuffix('weight')}{suffix}": info for suffix, info in own.items()}
            else:
                stored[named] = ("BF16", slot.shape)
        self.tensors = {
            name: TensorInfo(shape, dtype, "model.safetensors", 1) for name, (dtype, shape) in stored.items()
        }

    def read(self, name: str) -> torch.Tensor:
        raise NotImplementedError(name)


@pytest.mark.parametrize("name", RELEASES)
def test_a_quantised_release_has_a_place_for_every_tensor(name: str) -> None:
    release = RELEASES[name]
    config = four_layers(published(release.model)) | {"quantization_config": release.declared}
    model = build_model(config, META)
    reader = lay_out(Stored(model.slots(), release), model.LAYOUT)
    scheme = scheme_of(Checkpoint(Path(name), "safetensors", config, {}, name))
    loading = plan_loading(reader, scheme, model.slots(), model.ignores, dtype=torch.bfloat16, expand=False)
    loading.allocate(META)
    forms = {fill.name.removesuffix(".weight"): fill.form.format.name for fill in loading.fills if fill.form}
    plain = {module for module, form in forms.items() if form == "bf16"}
    assert plain == {module for module in forms if re.fullmatch(release.plain, module)}
    assert {form for module, form in forms.items() if module not in plain} == {release.form}
