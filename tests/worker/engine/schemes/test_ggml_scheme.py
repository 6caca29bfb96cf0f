"""The forms of GGUF's tensors, against the package `gguf`."""

import gguf
import libgguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.ggml import Ggml
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.schemes.ggml import BLOCK_TYPES
from moebius_worker.engine.weights.schemes.registry import scheme_of
from tests.worker.engine.schemes.stored_tensors import checkpoint, fits

SCHEME = scheme_of(checkpoint(None, "gguf"))
SHAPE = (6, 512)


def info(type_: str, shape: tuple[int, ...] = SHAPE) -> TensorInfo:
    return TensorInfo(shape, type_, "model.gguf", 0)


def quantised(type_: Type) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    return libgguf.quantize_rows(values, type_)


def test_every_block_type_of_the_package_that_weights_have_is_known():
    plain = {Type.F32, Type.F16, Type.BF16, Type.F64, Type.I8, Type.I16, Type.I32, Type.I64}
    internal = {Type.Q8_1, Type.Q8_K}  # of activations, never in files
    assert set(Type) - plain - internal == BLOCK_TYPES


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (Type.Q4_K, Ggml(Type.Q4_K)),
        (Type.IQ3_S, Ggml(Type.IQ3_S)),
        (Type.MXFP4, Mxfp4()),
        (Type.NVFP4, Nvfp4()),
    ],
)
def test_blocks_have_ggufs_values_in_the_form_that_other_containers_have(type_: Type, expected):
    data = quantised(type_)
    form = SCHEME.form("m.weight", {"m.weight": info(type_.name)})
    assert (form.format, form.shape, form.sources) == (expected, SHAPE, ("m.weight",))
    matrix = form.read({"m.weight": torch.from_numpy(data)}.__getitem__)
    fits(matrix)
    np.testing.assert_array_equal(matrix.dequantize().numpy(), gguf.dequantize(data, type_))


def test_every_factor_of_nvfp4s_blocks_is_kept():
    """Each is one of 127 numbers; the last code is none."""
    data = np.random.default_rng(0).integers(0, 256, (127, 36), np.uint8)
    data[:, :4] = np.arange(127)[:, None]
    form = SCHEME.form("m.weight", {"m.weight": info("NVFP4", (127, 64))})
    values = form.read({"m.weight": torch.from_numpy(data)}.__getitem__).dequantize().numpy()
    np.testing.assert_array_equal(values, gguf.dequantize(data, Type.NVFP4))


def test_every_power_of_mxfp4s_blocks_is_kept():
    data = np.random.default_rng(0).integers(0, 256, (255, 17), np.uint8)
    data[:, 0] = np.arange(255)
    form = SCHEME.form("m.weight", {"m.weight": info("MXFP4", (255, 32))})
    values = form.read({"m.weight": torch.from_numpy(data)}.__getitem__).dequantize().numpy()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values, gguf.dequantize(data, Type.MXFP4))


def test_nvfp4s_factor_of_the_matrix_multiplies():
    data = quantised(Type.NVFP4)
    tensors = {"m.weight": info("NVFP4"), "m.scale": info("F32", (1,)), "m.input_scale": info("F32", (1,))}
    form = SCHEME.form("m.weight", tensors)
    assert set(form.sources) == set(tensors)
    values = form.read({"m.weight": torch.from_numpy(data), "m.scale": torch.tensor([0.37])}.__getitem__)
    expected = gguf.dequantize(data, Type.NVFP4) * np.float32(0.37)
    np.testing.assert_array_equal(values.dequantize().numpy(), expected)


@pytest.mark.parametrize(
    ("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_floating_numbers_are_taken_as_they_are(name: str, dtype: torch.dtype):
    assert SCHEME.form("m.weight", {"m.weight": info(name, (7,))}).format == Dense(dtype)


def test_other_types_and_shapes_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"m\.weight in model\.gguf has the type Q8_K.* F32, .*Q4_K"):
        SCHEME.form("m.weight", {"m.weight": info("Q8_K")})
    with pytest.raises(CheckpointError, match=r"m\.weight in model\.gguf has the type F64"):
        SCHEME.form("m.weight", {"m.weight": info("F64")})
    with pytest.raises(CheckpointError, match=r"m\.weight is Q4_K \[2, 2, 256\] in model\.gguf"):
        SCHEME.form("m.weight", {"m.weight": info("Q4_K", (2, 2, 256))})
    with pytest.raises(CheckpointError, match=r"m\.weight is not in model\.gguf"):
        SCHEME.form("m.weight", {"other.weight": info("F32")})
    with pytest.raises(CheckpointError, match=r"m\.scale is F32 \[2\]"):
        SCHEME.form("m.weight", {"m.weight": info("NVFP4"), "m.scale": info("F32", (2,))})
