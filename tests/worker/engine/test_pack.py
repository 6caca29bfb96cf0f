"""Weights in the forms that GPU kernels read are the same numbers, and take the bytes that were planned."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.ggml import Ggml
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import packed_format
from moebius_worker.engine.models.parameters import Matrix, Place
from moebius_worker.engine.weights.dummy import FORMS, DummyWeights
from moebius_worker.engine.weights.load import plan_loading

CPU = Place(torch.device("cpu"), torch.bfloat16)
META = Place(torch.device("meta"), torch.bfloat16)


@pytest.mark.parametrize("form", [Nvfp4(), Ggml(Type.Q4_0), Ggml(Type.Q4_K), FORMS["int4"]])
def test_packing_a_loaded_matrix(form) -> None:
    matrix = Matrix({"gate_proj": 64, "up_proj": 64}, 256, experts=3)
    slots = {f"{e}.{part}.weight": matrix.slot(part, e) for e in range(3) for part in matrix.parts}
    weights = DummyWeights(slots, form, CPU.device)
    loading = plan_loading(weights, weights, slots, lambda _: False, dtype=CPU.dtype, expand=False)
    loading.allocate(META)
    planned = loading.packed_nbytes
    loading.allocate(CPU)
    loading.fill()
    values = matrix.blocks[0].dequantize()
    loading.pack()
    assert matrix.blocks[0].format == packed_format(form) != form
    # Kernels take the factors of integers in bf16.
    exact = isinstance(form, Nvfp4)
    torch.testing.assert_close(
        matrix.blocks[0].dequantize(), values, rtol=0, atol=0 if exact else float(values.abs().max()) / 100
    )
    assert loading.nbytes == planned
