"""What the quantisers' checkpoints of tests/data do not show: made here, and compared with numpy."""

import numpy as np
import pytest
import torch

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_worker.engine.weights.schemes.kv_scales import is_kv_scale
from tests.worker.engine.schemes import oracles
from tests.worker.engine.schemes.stored_tensors import form, infos, scheme, stored

RANDOM = np.random.default_rng(0)


def integers(high: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, high, shape, np.int64)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n * bits/32] of codes [..., n], the first lowest; the last word is filled up with zeros."""
    per_word = 32 // bits
    filled = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word) * per_word), np.uint64)
    filled[..., : codes.shape[-1]] = codes
    fields = filled.reshape(*codes.shape[:-1], -1, per_word) << np.arange(0, 32, bits, dtype=np.uint64)
    return fields.sum(-1).astype(np.uint32).view(np.int32)


def halves(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.001, 0.1, shape).astype(np.float16)


def fp8(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RANDOM.standard_normal(shape).astype(np.float32)).to(torch.float8_e4m3fn)


def module(tensors: dict[str, np.ndarray | torch.Tensor], name: str = "m") -> dict[str, torch.Tensor]:
    return {f"{name}.{last}": torch.as_tensor(tensor) for last, tensor in tensors.items()}


def raw(tensors: dict[str, np.ndarray | torch.Tensor]) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in tensors.items():
        tensor = torch.as_tensor(tensor)
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            tensor = tensor.view(torch.uint8)
        elif tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        found[name] = tensor.numpy()
    return found


def equal(matrix, expected: np.ndarray) -> None:
    assert matrix.shape == expected.shape
    np.testing.assert_array_equal(matrix.dequantize().numpy(), expected.astype(np.float32))


def compressed_tensors(format: str, **weights) -> dict:
    declared = {"symmetric": True, "strategy": "channel", **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": declared}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rows", [16, 13])  # 13: the last word of the zero points is not full
def test_packed_integers(bits: int, group: int | None, symmetric: bool, rows: int):
    columns = 96
    groups = columns // group if group else 1
    tensors = {
        "weight_packed": pack(integers(2**bits, rows, columns), bits),
        "weight_scale": halves(rows, groups),
        "weight_shape": np.array([rows, columns]),
    }
    if not symmetric:
        zero_points = integers(2**bits, rows, groups)
        tensors["weight_zero_point"] = pack(zero_points.T, bits).T.copy()
    declared = compressed_tensors(
        "pack-quantized",
        type="int",
        num_bits=bits,
        strategy="group" if group else "channel",
        group_size=group,
        symmetric=symmetric,
    )
    matrix = stored(declared, module(tensors))
    assert matrix.format == IntGroup(bits, group, not symmetric, torch.float16)
    equal(matrix, oracles.ct_packed(raw(tensors), bits, group))


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("strategy", "group", "scale_shape"),
    [("channel", None, (6, 1)), ("tensor", None, (1,)), ("group", 32, (6, 3))],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(format: str, strategy: str, group: int | None, scale_shape: tuple[int, ...], symmetric: bool):
    weight = (integers(256, 6, 96) - 128).astype(np.int8)
    tensors = {"weight": weight, "weight_scale": halves(*scale_shape)}
    zero = np.zeros((6, 1))
    if not symmetric:
        tensors["weight_zero_point"] = (integers(256, *scale_shape) - 128).astype(np.int8)
        zero = np.broadcast_to(
            tensors["weight_zero_point"].reshape(-1, scale_shape[-1]), (6, scale_shape[-1])
        )
        zero = np.repeat(zero, group or 96, axis=1).astype(np.float32)
    declared = compressed_tensors(
        format, type="int", num_bits=8, strategy=strategy, group_size=group, symmetric=symmetric
    )
    matrix = stored(declared, module(tensors))
    assert matrix.format == IntGroup(8, group, not symmetric, torch.float16)
    scale = np.broadcast_to(tensors["weight_scale"].reshape(-1, scale_shape[-1]), (6, scale_shape[-1]))
    equal(
        matrix, (weight.astype(np.float32) - zero) * np.repeat(scale.astype(np.float32), group or 96, axis=1)
    )


@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("arguments", "scale_shape", "block"),
    [
        ({"strategy": "tensor"}, (1,), None),
        ({"strategy": "channel"}, (200, 1), None),
        ({"strategy": "group", "group_size": 32}, (200, 5), (1, 32)),
        ({"strategy": "block", "block_structure": [128, 64]}, (2, 3), (128, 64)),
    ],
    ids=lambda value: value.get("strategy") if isinstance(value, dict) else None,
)
def test_fp8_of_compressed_tensors(format: str, arguments: dict, scale_shape: tuple[int, ...], block):
    tensors = {"weight": fp8(200, 160), "weight_scale": torch.from_numpy(halves(*scale_shape)).bfloat16()}
    matrix = stored(compressed_tensors(format, type="float", num_bits=8, **arguments), module(tensors))
    assert matrix.format == (Fp8(*block) if block else Fp8())
    equal(matrix, oracles.fp8(raw(tensors), block))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_in_blocks_with_ragged_ends(scale_dtype: torch.dtype):
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    tensors = {"weight": fp8(200, 300), "weight_scale_inv": torch.rand(2, 3).to(scale_dtype)}
    matrix = stored(declared, module(tensors))
    assert matrix.format == Fp8(128, 128, rounds_activations=True)
    numbers = raw(tensors) | {"weight_scale_inv": tensors["weight_scale_inv"].float().numpy()}
    equal(matrix, oracles.fp8(numbers, (128, 128), "weight_scale_inv"))


EIGHT = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
GROUP = {"targets": ["Linear"], "weights": EIGHT}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


@pytest.mark.parametrize(
    ("declared", "rounds"),
    [
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (COMPRESSED | {"config_groups": {"group": GROUP}}, False),
        (COMPRESSED | {"config_groups": {"group": GROUP | {"input_activations": None}}}, False),
        (COMPRESSED | {"config_groups": {"group": GROUP | {"input_activations": EIGHT}}}, True),
        (
            COMPRESSED
            | {"config_groups": {"group": GROUP | {"input_activations": {"type": "int", "num_bits": 8}}}},
            False,
        ),
    ],
)
def test_products_may_round_activations_where_the_checkpoint_says_so(declared: dict, rounds: bool):
    tensors = {"weight": fp8(8, 32), "weight_scale": torch.rand(8, 1)}
    assert stored(declared, module(tensors)).format == Fp8(rounds_activations=rounds)


def test_fp8_per_tensor_with_all_codes():
    tensors = {
        "weight": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(8, 32),
        "weight_scale": torch.tensor(0.37),
        "input_scale": torch.tensor(1.5),
    }
    for declared in ({"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}):
        found = form(declared, module(tensors))
        assert set(found.sources) == {"m.weight", "m.weight_scale", "m.input_scale"}
        equal(stored(declared, module(tensors)), oracles.fp8(raw(tensors)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [-1, 32])
@pytest.mark.parametrize("version", [1, 2])
def test_asymmetric_gptq(bits: int, group: int, version: int):
    rows, columns = 24, 96
    groups = 1 if group == -1 else columns // group
    tensors = {
        "qweight": pack(integers(2**bits, rows, columns), bits).T.copy(),
        "qzeros": pack(integers(2**bits, groups, rows), bits),
        "scales": halves(groups, rows),
        "g_idx": (np.arange(columns) // (columns // groups)).astype(np.int32),
    }
    declared = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False}
    if version == 2:
        declared["checkpoint_format"] = "gptq_v2"
    matrix = stored(declared, module(tensors))
    assert matrix.format == IntGroup(bits, None if group == -1 else group, True, torch.float16)
    equal(matrix, oracles.gptq(raw(tensors), bits, version))
    without_order = {name: tensor for name, tensor in tensors.items() if name != "g_idx"}
    equal(stored(declared, module(without_order)), oracles.gptq(raw(tensors), bits, version))


@pytest.mark.parametrize("group", [-1, 32])
def test_awq_with_zero_points(group: int):
    rows, columns = 24, 96
    groups = 1 if group == -1 else columns // group
    tensors = {
        "qweight": pack(integers(16, columns, rows), 4),
        "qzeros": pack(integers(16, groups, rows), 4),
        "scales": halves(groups, rows),
    }
    declared = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "GEMM"}
    matrix = stored(declared, module(tensors))
    assert matrix.format == IntGroup(4, None if group == -1 else group, True, torch.float16)
    equal(matrix, oracles.awq(raw(tensors)))


def nvfp4(rows: int = 4, columns: int = 32) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.from_numpy(integers(256, rows, columns // 2).astype(np.uint8)),
        "weight_scale": fp8(rows, columns // 16),
        "weight_scale_2": torch.tensor(0.01),
    }


def test_modelopts_mixed_precision_by_layer_and_by_block_of_experts():
    declared = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.1.mlp.down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        },
    }
    query, expert, down, value = (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.experts.7.up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.0.self_attn.v_proj",
    )
    tensors = {
        **module({"weight": fp8(4, 32), "weight_scale": torch.tensor(0.5)}, query),
        **module(nvfp4(), expert),
        **module(nvfp4(), down),
        **module({"weight": torch.zeros(4, 32, dtype=torch.bfloat16)}, value),
    }
    forms = {name: form(declared, tensors, name).format for name in (query, expert, down, value)}
    eight = Fp8(rounds_activations=True)
    assert forms == {query: eight, expert: Nvfp4(), down: Nvfp4(), value: Dense(torch.bfloat16)}


def test_modelopts_older_file_says_the_same_one_level_deeper():
    declared = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    }
    tensors = nvfp4()
    equal(stored(declared, module(tensors)), oracles.modelopt_nvfp4(raw(tensors)))


def test_groups_of_compressed_tensors_go_by_name_first_and_class_last():
    packed = {"type": "int", "num_bits": 4, "strategy": "channel", "symmetric": True}
    eight = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": eight, "format": "float-quantized"},
            "group_1": {
                "targets": ["re:.*mlp.experts.*"],
                "weights": packed,
                "format": "pack-quantized",
            },
        },
        "ignore": ["re:.*shared.*"],
    }
    expert, query, shared = "model.layers.0.mlp.experts.1.up_proj", "model.layers.0.q_proj", "model.shared"
    tensors = {
        **module({"weight_packed": pack(integers(16, 4, 16), 4), "weight_scale": halves(4, 1)}, expert),
        **module({"weight": fp8(4, 16), "weight_scale": halves(4, 1)}, query),
        **module({"weight": torch.zeros(4, 16)}, shared),
    }
    forms = {name: form(declared, tensors, name).format for name in (expert, query, shared)}
    assert forms == {
        expert: IntGroup(4, None, False, torch.float16),
        query: Fp8(),
        shared: Dense(torch.float32),
    }


def test_gptqs_exceptions_by_regular_expression():
    declared = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "dynamic": {r"-:.*\.gate$": {}, r"+:.*\.down_proj$": {"bits": 8, "group_size": 16}},
    }
    down = {
        "qweight": pack(integers(256, 8, 32), 8).T.copy(),
        "qzeros": pack(integers(256, 2, 8), 8),
        "scales": halves(2, 8),
    }
    gate = {"weight": torch.zeros(4, 32, dtype=torch.bfloat16)}
    tensors = module(down, "model.down_proj") | module(gate, "model.gate")
    assert form(declared, tensors, "model.down_proj").format == IntGroup(8, 16, True, torch.float16)
    assert form(declared, tensors, "model.gate").format == Dense(torch.bfloat16)


def test_a_layer_that_is_declared_but_floating_is_taken_as_it_is():
    """Configs say "all linear layers"; embeddings and some routers are not meant."""
    tensors = module({"weight": torch.zeros(8, 16, dtype=torch.bfloat16)}, "model.embed_tokens")
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    assert form(declared, tensors, "model.embed_tokens").format == Dense(torch.bfloat16)


def test_parameters_that_are_no_weights_are_floating_numbers_of_any_shape():
    tensors = {"m.bias": torch.zeros(3), "m.conv.weight": torch.zeros(4, 1, 3, dtype=torch.float16)}
    declared = scheme(None)
    assert declared.form("m.bias", infos(tensors)).format == Dense(torch.float32)
    found = declared.form("m.conv.weight", infos(tensors))
    assert (found.format, found.shape) == (Dense(torch.float16), (4, 1, 3))


@pytest.mark.parametrize(
    ("name", "is_scale"),
    [
        ("model.layers.0.self_attn.k_proj.k_scale", True),
        ("model.layers.0.self_attn.v_scale", True),
        ("model.layers.0.self_attn.attn.q_scale", True),
        ("model.layers.0.self_attn.k_proj.weight_scale", False),
        ("model.layers.0.self_attn.k_scale.weight", False),
        ("model.layers.0.router.scale", False),
    ],
)
def test_factors_of_the_key_value_cache_are_known_by_name(name: str, is_scale: bool):
    assert is_kv_scale(name) is is_scale
