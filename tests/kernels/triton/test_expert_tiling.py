"""Which tiling a call gets, and which calls the kernels admit."""

import pytest
import torch

from moebius_kernels.activations import SILU
from moebius_kernels.calls import shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.registry import Device, Query, TokenRange, refusal
from moebius_kernels.router import topk_softmax
from tests.kernels.formats.ggml_bytes import random_bytes, stored
from tests.kernels.triton.matrices import FORMATS

triton = pytest.importorskip("triton")
from gguf import GGMLQuantizationType as Type  # noqa: E402

from moebius_kernels.triton.expert_tiling import (  # noqa: E402
    TABLE,
    ExpertShape,
    Measurement,
    expert_tiling,
    read_table,
    rules,
    write_table,
)
from moebius_kernels.triton.experts import BACKENDS as EXPERTS  # noqa: E402
from moebius_kernels.triton.linear import BACKENDS as LINEAR  # noqa: E402
from moebius_kernels.triton.tiling import ExpertTiling, Tiling  # noqa: E402

H200 = Device("cuda", "NVIDIA H200", (9, 0))
UNKNOWN = ExpertShape("int5", "int6", 60, 4, 1408, 352)


def test_measured_shapes_get_what_was_measured():
    measured = read_table(TABLE)
    assert measured
    for one in measured:
        assert expert_tiling(one.tokens, one.shape) == one.tiling


def test_near_token_counts_are_served_and_far_ones_follow_the_rules():
    [eight] = [one for one in read_table(TABLE) if one.tokens == 8 and one.shape.gate_up == "bf16"]
    assert expert_tiling(10, eight.shape) == eight.tiling
    assert expert_tiling(2, eight.shape) == rules(2, eight.shape)
    assert expert_tiling(8, UNKNOWN) == rules(8, UNKNOWN)


@pytest.mark.parametrize("code", ["bf16", "nvfp4_words", "int4_words", "e4m3"])
@pytest.mark.parametrize("tokens", [1, 2, 16, 100, 1000, 20_000])
def test_tiles_of_both_products_agree(code, tokens):
    tiling = rules(tokens, ExpertShape(code, "int4", 128, 8, 2048, 768))
    assert tiling.gate_up.tokens == tiling.down.tokens
    assert tiling.gate_up.splits == 1


@pytest.mark.parametrize("inner", [512, 640, 704, 768, 1408])
@pytest.mark.parametrize("code", ["nvfp4_words", "int6"])
def test_steps_leave_few_columns_idle(code, inner):
    """Where an expert has few tokens, what is read is what counts."""
    tiling = rules(32, ExpertShape(code, code, 256, 8, 2560, inner))
    for tile, columns in ((tiling.gate_up, 2560), (tiling.down, inner)):
        assert -columns % tile.columns <= columns / 10


def test_a_table_keeps_the_best(tmp_path):
    slow = ExpertTiling(Tiling(8, 64, 128), Tiling(8, 32, 64, splits=2))
    fast = ExpertTiling(Tiling(8, 16, 128, parts=1), Tiling(8, 16, 64, swap=False))
    write_table(
        tmp_path / "table.json", [Measurement(UNKNOWN, 4, us, it) for us, it in ((2, slow), (1, fast))]
    )
    assert read_table(tmp_path / "table.json") == [Measurement(UNKNOWN, 4, 1, fast)]


def experts_query(gate_up, down, dtype=torch.bfloat16):
    x = torch.zeros(2, gate_up[0].shape[-1], dtype=dtype)
    call = {
        "x": x,
        "route": topk_softmax(torch.zeros(2, 3), 2),
        "weights": ExpertWeights(gate_up, down),
        "activation": SILU,
    }
    return Query("routed_experts", shapes_of("routed_experts", call), TokenRange(1, 64), H200)


def test_what_experts_are_admitted():
    [backend] = EXPERTS
    generator = torch.Generator()
    gate_up, down = (random_matrix(FORMATS["q4_k"], (3, rows, 256), generator) for rows in (512, 256))
    assert refusal(backend, experts_query([gate_up], down)) is None
    assert "float32" in refusal(backend, experts_query([gate_up], down, torch.float32))
    rare = stored(Type.IQ2_XXS, random_bytes(Type.IQ2_XXS, rows=3 * 256, blocks=1).reshape(3, 256, -1))
    assert "iq2_xxs" in refusal(backend, experts_query([gate_up], rare))
    other = dense(torch.zeros(3, 256, 256, dtype=torch.bfloat16))
    assert "two forms" in refusal(backend, experts_query([other, gate_up], down))


def test_what_dense_layers_are_admitted():
    [backend] = LINEAR
    for name, format in FORMATS.items():
        block = random_matrix(format, (8, 256), torch.Generator())
        call = {"x": torch.zeros(1, 256, dtype=torch.bfloat16), "blocks": [block], "bias": None}
        query = Query("linear", shapes_of("linear", call), TokenRange(1, 64), H200)
        assert refusal(backend, query) is None, name
