"""Checkpoints that are not what their config declares, and declarations that are not supported."""

import re

import numpy as np
import pytest
import torch

from moebius_worker.checkpoint.errors import CheckpointError
from tests.worker.engine.schemes.stored_tensors import form, infos, scheme, stored

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "m.gate*"]}
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def compressed_tensors(format: str | None, weights: object = None, **others) -> dict:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        **others,
    }


NVFP4 = {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group", "symmetric": True}
INT4 = {"type": "int", "num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}
CT_NVFP4 = compressed_tensors("nvfp4-pack-quantized", NVFP4, ignore=["lm_head"])
CT_INT4 = compressed_tensors("pack-quantized", INT4)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


U8, I32, F32, F16, BF16 = torch.uint8, torch.int32, torch.float32, torch.float16, torch.bfloat16
E4M3 = torch.float8_e4m3fn


def whole(declared: dict) -> dict[str, torch.Tensor]:
    """The tensors of a module [8, 64] as declared."""
    return {
        id(MODELOPT): {
            "weight": zeros(U8, 8, 32),
            "weight_scale": zeros(E4M3, 8, 4),
            "weight_scale_2": zeros(F32),
        },
        id(CT_NVFP4): {
            "weight_packed": zeros(U8, 8, 32),
            "weight_scale": zeros(E4M3, 8, 4),
            "weight_global_scale": zeros(F32, 1),
        },
        id(CT_INT4): {"weight_packed": zeros(I32, 8, 8), "weight_scale": zeros(BF16, 8, 2)},
        id(BLOCK): {"weight": zeros(E4M3, 8, 64), "weight_scale_inv": zeros(F32, 1, 1)},
        id(OSS): {"weight_blocks": zeros(U8, 8, 2, 16), "weight_scales": zeros(U8, 8, 2)},
        id(AWQ): {
            "qweight": zeros(I32, 64, 1),
            "qzeros": zeros(I32, 2, 1),
            "scales": zeros(F16, 2, 8),
        },
        id(GPTQ): {
            "qweight": zeros(I32, 8, 8),
            "qzeros": zeros(I32, 2, 1),
            "scales": zeros(F16, 2, 8),
        },
    }[id(declared)]


DIALECTS = pytest.mark.parametrize(
    "declared",
    [MODELOPT, CT_NVFP4, CT_INT4, BLOCK, OSS, AWQ, GPTQ],
    ids=["modelopt", "ct-nvfp4", "ct-int4", "fp8", "gpt-oss", "awq", "gptq"],
)


def named(tensors: dict[str, torch.Tensor], module: str = "m") -> dict[str, torch.Tensor]:
    return {f"{module}.{last}": tensor for last, tensor in tensors.items()}


@DIALECTS
def test_every_missing_tensor_is_named_with_its_file(declared: dict):
    tensors = whole(declared)
    assert form(declared, named(tensors)).shape == (8, 64)
    for last in tensors:
        rest = {name: tensor for name, tensor in tensors.items() if name != last}
        with pytest.raises(
            CheckpointError, match=rf"m\.{last}, which .* needs, is not in model\.safetensors"
        ):
            form(declared, named(rest))


@DIALECTS
def test_every_tensor_of_another_shape_is_named_with_both_shapes_and_the_file(declared: dict):
    for last, tensor in whole(declared).items():
        other = torch.zeros((*tensor.shape[:-1], 300) if tensor.ndim else (3,), dtype=tensor.dtype)
        tensors = whole(declared) | {last: other}
        with pytest.raises(CheckpointError, match=r" is \w+ \[.*\] in model\.safetensors, where .* has "):
            form(declared, named(tensors))


@DIALECTS
def test_every_tensor_of_another_dtype_is_named_with_it(declared: dict):
    for last, tensor in whole(declared).items():
        tensors = whole(declared) | {last: tensor.double()}
        with pytest.raises(CheckpointError, match=rf"m\.{last} is F64 \[.*in model\.safetensors, where"):
            form(declared, named(tensors))


@pytest.mark.parametrize(
    ("declared", "module"),
    [
        (MODELOPT, "lm_head"),
        (MODELOPT, "m.gate_x"),
        (CT_NVFP4, "lm_head"),
        (OSS, "model.layers.3.self_attn.q_proj"),
    ],
)
def test_scales_where_none_are_declared_are_refused(declared: dict, module: str):
    tensors = named(whole(declared), module)
    message = (
        rf"{re.escape(module)}\.weight_\w+ is .* in model\.safetensors, but the config .* no quantisation"
    )
    with pytest.raises(CheckpointError, match=message):
        form(declared, tensors, module)


def test_scales_in_a_checkpoint_without_quantisation_are_refused():
    with pytest.raises(CheckpointError, match=r"m\.weight_scale is .*not quantised\) declares no"):
        form(None, named(whole(MODELOPT)))


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, U8, torch.int8, torch.float64])
@pytest.mark.parametrize("name", ["m.weight", "m.bias"])
def test_numbers_that_are_no_floating_ones_are_refused_without_quantisation(dtype: torch.dtype, name: str):
    tensors = {name: zeros(dtype, 4, 4)}
    with pytest.raises(CheckpointError, match=rf"{name} is \w+ \[4, 4\] in model\.safetensors, but"):
        scheme(None).form(name, infos(tensors))


def test_a_weight_that_is_not_there_is_named():
    other = {"other.weight": zeros(BF16, 2, 2)}
    with pytest.raises(CheckpointError, match=r"m\.weight is not in model\.safetensors"):
        form(None, other)
    with pytest.raises(CheckpointError, match=r"m\.weight, which NVFP4 needs, is not in model\.safetensors"):
        form(MODELOPT, other)


def test_a_power_of_two_that_is_none_is_refused():
    tensors = whole(OSS) | {"weight_scales": torch.full((8, 2), 255, dtype=U8)}
    with pytest.raises(CheckpointError, match=r"m\.weight_scales in model\.safetensors holds NaN"):
        stored(OSS, named(tensors))


def test_modelopts_checkpoints_of_which_only_the_cache_is_quantised_are_plain():
    declared = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert form(declared, {"m.weight": zeros(BF16, 8, 64)}).format.name == "bf16"
    with pytest.raises(CheckpointError, match="declares no quantisation of m"):
        form(declared, named(whole(MODELOPT)))


def test_e5m2_is_refused_by_name():
    tensors = whole(BLOCK) | {"weight": zeros(torch.float8_e5m2, 8, 64)}
    with pytest.raises(CheckpointError, match="is F8_E5M2"):
        form(BLOCK, named(tensors))


def test_columns_that_fill_no_block_are_refused():
    tensors = {
        "weight": zeros(U8, 8, 20),
        "weight_scale": zeros(E4M3, 8, 3),
        "weight_scale_2": zeros(F32),
    }
    with pytest.raises(
        CheckpointError, match=r"m\.weight in model\.safetensors has 40 columns, .* multiple of the 16"
    ):
        form(MODELOPT, named(tensors))


def test_packed_columns_that_do_not_fill_their_words_are_refused():
    tensors = whole(CT_INT4) | {"weight_shape": torch.tensor([8, 60])}
    with pytest.raises(
        CheckpointError, match=r"m in model\.safetensors has the shape \[8, 60\], where \[8, 64\]"
    ):
        stored(CT_INT4, named(tensors))


def test_gptqs_reordered_columns_are_refused_by_name():
    order = (torch.arange(64) // 32).flip(0).int()
    tensors = whole(GPTQ) | {"g_idx": order}
    with pytest.raises(CheckpointError, match=r"m\.g_idx in model\.safetensors .* \(desc_act\)"):
        stored(GPTQ, named(tensors))


@pytest.mark.parametrize("declared", [GPTQ | {"sym": True}, AWQ | {"zero_point": False}])
def test_zero_points_that_contradict_symmetry_are_refused(declared: dict):
    tensors = whole(GPTQ if declared["quant_method"] == "gptq" else AWQ)
    with pytest.raises(
        CheckpointError, match=r"m\.qzeros in model\.safetensors holds the zero point [01], but"
    ):
        stored(declared, named(tensors))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes, which is not supported. Supported are modelopt, "),
        ({"quant_method": "auto-round", "bits": 4}, "auto-round 4-bit, which is not supported"),
        ({"bits": 4}, "unnamed 4-bit, which is not"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            "NVFP4_AWQ is not supported. .* NVFP4, W4A16_NVFP4, FP8",
        ),
        (MODELOPT | {"group_size": 32}, "group size 32 is not supported; 16 is"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "but no quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"m": {"quant_algo": "W8A16"}},
            },
            "modelopt W8A16 is not supported",
        ),
        (compressed_tensors("marlin-24", INT4), "marlin-24, .*group_0 .*nvfp4-pack-quantized"),
        (compressed_tensors("mxfp8-quantized", NVFP4), "mxfp8-quantized"),
        (compressed_tensors("mixed-precision", NVFP4), "mixed-precision, which the config group"),
        (compressed_tensors(None, NVFP4), "None, which the config group"),
        (
            compressed_tensors("pack-quantized", INT4 | {"num_bits": 3}),
            "num_bits 3 is not supported; 4 and 8",
        ),
        (compressed_tensors("pack-quantized", INT4 | {"actorder": "group"}), "actorder group is not"),
        (compressed_tensors("pack-quantized", INT4 | {"group_size": None}), "group_size None is not"),
        (compressed_tensors("pack-quantized", INT4 | {"strategy": "tensor"}), "strategy tensor is not"),
        (compressed_tensors("int-quantized", INT4), "num_bits 4 is not"),
        (compressed_tensors("nvfp4-pack-quantized", NVFP4 | {"group_size": 32}), "group_size 32 is not"),
        (compressed_tensors("nvfp4-pack-quantized", NVFP4 | {"symmetric": False}), "symmetric False"),
        (compressed_tensors("float-quantized", NVFP4), "num_bits 4 is not supported; 8"),
        (
            compressed_tensors(
                "float-quantized", {"type": "float", "num_bits": 8, "strategy": "block", "symmetric": True}
            ),
            "block size None",
        ),
        (compressed_tensors("pack-quantized", None), "group_0 of compressed-tensors does not describe"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"FP8": ["Linear"]}},
            "config group FP8 of compressed-tensors does not describe",
        ),
        (CT_INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (CT_INT4 | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (BLOCK | {"weight_block_size": [128]}, r"block size \[128\]"),
        (BLOCK | {"weight_block_size": [128, 0]}, r"block size \[128, 0\]"),
        (AWQ | {"version": "gemv"}, "4 bits in the order gemv"),
        (AWQ | {"bits": 8}, "awq of 8 bits"),
        (AWQ | {"group_size": 0}, "group size 0"),
        (GPTQ | {"bits": 3}, "gptq with 3 bits is not supported; 4 and 8 are"),
        (GPTQ | {"desc_act": True}, "desc_act"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format marlin is not supported"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, "gptq with 2 bits"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "no regular expression"),
        (CT_INT4 | {"ignore": ["re:("]}, "no regular expression"),
    ],
)
def test_declarations_that_are_not_supported_say_so_by_name(declared: dict, message: str):
    with pytest.raises(CheckpointError, match=f"somewhere.*{message}"):
        scheme(declared)


def test_an_empty_sparsity_or_a_dense_one_is_no_obstacle():
    for sparsity in ({}, None, {"format": "dense"}):
        assert scheme(CT_INT4 | {"sparsity_config": sparsity}).name == "compressed-tensors pack-quantized"


def test_a_scale_is_one_number_or_one_a_row():
    tensors = whole(MODELOPT) | {"weight_scale_2": torch.from_numpy(np.arange(8, dtype=np.float32))}
    assert stored(MODELOPT, named(tensors)).parts["row_scale"].flatten().tolist() == list(range(8))
