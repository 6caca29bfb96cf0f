"""Every ggml type against the package `gguf`, and against llama.cpp's own quantiser and dequantiser."""

import gguf
import libgguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.format import FormatError, StoredMatrix
from moebius_kernels.formats.ggml import GGML_TYPES, Ggml
from tests.kernels.formats.ggml_bytes import DEVICE, random_bytes, stored

TYPES = sorted(GGML_TYPES)
# `gguf` cannot decode it.
IN_GGUF = [type_ for type_ in TYPES if type_ != Type.Q1_0]
# libgguf makes tables for seconds before it quantises to these.
SLOW = (Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S)


def quantised(type_: Type, rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
    return libgguf.quantize_rows(values, type_)


def equal(ours: torch.Tensor, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.cpu().numpy(), theirs.astype(np.float32).reshape(ours.shape))


@pytest.mark.parametrize("type_", IN_GGUF, ids=lambda type_: type_.name)
def test_random_bytes_have_ggufs_values(type_: Type):
    data = random_bytes(type_, rows=3, blocks=5)
    equal(stored(type_, data).dequantize(), gguf.dequantize(data, type_))


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
def test_llama_cpps_blocks_have_llama_cpps_values(type_: Type):
    data = random_bytes(type_, rows=4, blocks=2) if type_ in SLOW else quantised(type_, rows=4, columns=512)
    equal(stored(type_, data).dequantize(), libgguf.dequantize_rows(data, type_))


@pytest.mark.parametrize("type_", [Type.Q4_K, Type.IQ3_S], ids=lambda type_: type_.name)
def test_leading_dimensions_are_kept(type_: Type):
    data = random_bytes(type_, rows=6, blocks=2)
    whole = stored(type_, data).dequantize()
    stacked = stored(type_, data.reshape(2, 3, -1))
    assert torch.equal(stacked.dequantize(), whole.reshape(2, 3, -1))
    assert torch.equal(stacked[1].dequantize(), whole[3:])


def test_columns_are_cut_at_blocks_alone():
    matrix = stored(Type.Q4_K, random_bytes(Type.Q4_K, rows=2, blocks=3))
    assert torch.equal(matrix.narrow_columns(256, 256).dequantize(), matrix.dequantize()[:, 256:512])
    with pytest.raises(FormatError, match="shares data among 256 columns"):
        matrix.narrow_columns(128, 256)
    with pytest.raises(FormatError, match="multiples of 256 columns, not 300"):
        StoredMatrix.empty(Ggml(Type.Q4_K), (2, 300), DEVICE)
