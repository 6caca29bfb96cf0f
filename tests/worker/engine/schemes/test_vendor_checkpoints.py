"""Every weight of the quantisers' own checkpoints against dequantisers in numpy, to the last bit."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
import torch

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from tests.worker.engine.schemes import oracles
from tests.worker.engine.schemes.stored_tensors import fits, infos, vendor

# The form of what is quantised, and its values.
EXPECTED = {
    "qwen3_moe-nvfp4-modelopt": (Nvfp4(), oracles.modelopt_nvfp4),
    "mixtral-nvfp4-modelopt": (Nvfp4(), oracles.modelopt_nvfp4),
    "gemma4_moe-nvfp4-modelopt": (Nvfp4(), oracles.modelopt_nvfp4),
    "qwen3_moe-fp8-modelopt": (Fp8(rounds_activations=True), oracles.fp8),
    "qwen3_moe-NVFP4-ct": (Nvfp4(), oracles.ct_nvfp4),
    "qwen3_moe-FP8_BLOCK-ct": (
        Fp8(128, 128, rounds_activations=True),
        partial(oracles.fp8, block=(128, 128)),
    ),
    "qwen3_moe-FP8_DYNAMIC-ct": (Fp8(rounds_activations=True), oracles.fp8),
    "qwen3_moe_wide-MXFP4-ct": (Mxfp4(), oracles.ct_mxfp4),
    "qwen3_moe_wide-W4A16-ct": (
        IntGroup(4, 128, False, torch.bfloat16),
        partial(oracles.ct_packed, bits=4, group=128),
    ),
    "qwen3_moe_wide-auto_gptq": (IntGroup(4, 128, False, torch.float16), oracles.gptq),
    "qwen3_moe_wide-auto_awq": (IntGroup(4, 128, False, torch.float16), oracles.awq),
}
# The last names of what quantised weights are stored as.
DATA = ("weight_packed", "qweight", "weight")


def weights(tensors: Mapping[str, object]) -> dict[str, bool]:
    """The names of all weights, and whether they are quantised."""
    found = {}
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last in DATA:
            found[f"{module}.weight"] = any(
                f"{module}.{mark}" in tensors for mark in ("weight_scale", "scales")
            )
    return found


def of_module(raw: Mapping[str, np.ndarray], module: str) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(f"{module}."): array
        for name, array in raw.items()
        if name.startswith(f"{module}.") and "." not in name.removeprefix(f"{module}.")
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_every_weight_has_its_form_and_value_and_every_tensor_is_somebodys(name: str):
    expected_form, oracle = EXPECTED[name]
    found = vendor(name)
    used: set[str] = set()
    quantised = 0
    for weight, is_quantised in weights(found.infos).items():
        form = found.scheme.form(weight, found.infos)
        used.update(form.sources)
        matrix = form.read(found.tensors.__getitem__)
        if is_quantised:
            assert form.format == expected_form, weight
            values = oracle(of_module(found.raw, weight.removesuffix(".weight")))
            fits(matrix)
            quantised += 1
        else:
            assert form.format == Dense(torch.bfloat16), weight
            values = found.raw[weight]
        assert form.shape == values.shape
        np.testing.assert_array_equal(matrix.dequantize().numpy(), values, weight)
    assert quantised >= 10
    # Left are parameters that are no weights, such as Gemma's factors.
    assert {info.dtype for name, info in found.infos.items() if name not in used} <= {"BF16"}


def test_gpt_osss_blocks_once_divided_into_experts():
    found = vendor("gpt_oss-mxfp4")
    prefix = "model.layers.0.mlp.experts."
    divided, raw = {}, {}
    for kind in ("blocks", "scales"):
        for expert in range(found.config["num_local_experts"]):
            fused = found.tensors[f"{prefix}gate_up_proj_{kind}"][expert]
            for part, rows in (("gate_proj", fused[0::2]), ("up_proj", fused[1::2])):
                divided[f"{prefix}{expert}.{part}.weight_{kind}"] = rows
                raw[f"{prefix}{expert}.{part}.weight_{kind}"] = rows.numpy()
    for expert in range(found.config["num_local_experts"]):
        for part in ("gate_proj", "up_proj"):
            module = f"{prefix}{expert}.{part}"
            form = found.scheme.form(f"{module}.weight", infos(divided))
            assert form.format == Mxfp4()
            values = form.read(divided.__getitem__).dequantize().numpy()
            np.testing.assert_array_equal(values, oracles.oss_mxfp4(of_module(raw, module)))
    router = found.scheme.form("model.layers.0.mlp.router.weight", found.infos)
    assert router.format == Dense(torch.bfloat16)


@pytest.mark.parametrize("name", ["qwen3_moe-nvfp4-modelopt", "qwen3_moe-NVFP4-ct"])
def test_the_two_ways_of_storing_nvfp4_have_the_same_scale_of_weights(name: str):
    """A global scale taken the wrong way round would be off by many orders of magnitude."""
    found = vendor(name)
    form = found.scheme.form("model.layers.0.self_attn.q_proj.weight", found.infos)
    values = form.read(found.tensors.__getitem__).dequantize()
    assert 0.01 < values.std() < 1


def test_dividing_by_the_global_scale_is_multiplying_by_its_inverse_within_a_rounding():
    found = vendor("qwen3_moe-NVFP4-ct")
    module = "model.layers.0.mlp.experts.0.down_proj"
    t = of_module(found.raw, module)
    form = found.scheme.form(f"{module}.weight", found.infos)
    codes = oracles.E2M1[oracles.nibbles(t["weight_packed"])]
    exact = codes * oracles.per_block(oracles.e4m3(t["weight_scale"]), codes.shape, 1, 16).astype(np.float64)
    values = form.read(found.tensors.__getitem__).dequantize().numpy()
    np.testing.assert_allclose(values, exact / t["weight_global_scale"].astype(np.float64), rtol=2.0**-22)
