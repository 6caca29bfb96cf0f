"""GGUF weights: every type as it is stored, llama.cpp's order of rows, refusals."""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from moebius_worker.engine.weights.gguf import GgufReader
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import (
    Type,
    gguf_tensors,
    llama_metadata,
    write_gguf,
    write_llama_gguf,
)

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MIXTRAL = {"llama.expert_count": 3}
PLAIN = {Type.F64, Type.F32, Type.F16, Type.BF16, Type.I8, Type.I16, Type.I32, Type.I64}


def checkpoint(path: Path, **config: Any) -> Checkpoint:
    return Checkpoint(path, "gguf", CONFIG | config, {}, "test")


def reader_of(path: Path, **config: Any) -> GgufReader:
    return GgufReader(checkpoint(path, **config))


def blocks(type_: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes: every one is a block of some numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[type_]
    source = np.random.default_rng(type_.value)
    return source.integers(0, 256, (*shape[:-1], shape[-1] // size * nbytes), dtype=np.uint8)


@pytest.mark.parametrize("type_", sorted(set(Type) - PLAIN), ids=lambda type_: type_.name)
def test_every_block_type_is_read_as_it_is_stored(tmp_path: Path, type_: Type) -> None:
    stored = {
        "output.weight": blocks(type_, (6, 512)),
        "blk.0.ffn_down_exps.weight": blocks(type_, (3, 4, 256)),
        "output_norm.weight": np.ones(8, dtype=np.float32),
    }
    types = {"output_norm.weight": Type.F32}
    path = write_gguf(tmp_path / "m.gguf", MIXTRAL, stored, lambda name, array: types.get(name, type_))
    reader = reader_of(path)
    experts = [f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(3)]
    assert list(reader.tensors) == ["lm_head.weight", *experts, "model.norm.weight"]
    np.testing.assert_array_equal(reader.read("lm_head.weight").numpy(), stored["output.weight"])
    for name, expected in zip(experts, stored["blk.0.ffn_down_exps.weight"], strict=True):
        np.testing.assert_array_equal(reader.read(name).numpy(), expected)
        assert reader.tensors[name].shape == (4, 256)
    assert reader.tensors["lm_head.weight"].dtype == type_.name
    assert reader.tensors["lm_head.weight"].shape == (6, 512)
    total = sum(info.nbytes for info in reader.tensors.values())
    assert total == sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)


@pytest.mark.parametrize("type_", sorted(PLAIN), ids=lambda type_: type_.name)
def test_plain_types_are_read_as_tensors(tmp_path: Path, type_: Type) -> None:
    numbers = np.arange(-12, 12).reshape(4, 6)
    dtype = {Type.F64: "f8", Type.F32: "f4", Type.F16: "f2", Type.I8: "i1", Type.I16: "i2", Type.I32: "i4"}
    if type_ == Type.BF16:
        raw = gguf.quants.quantize(numbers.astype(np.float32), type_).view(np.uint8)
    else:
        raw = numbers.astype(dtype.get(type_, "i8")).view(np.uint8)
    path = write_gguf(tmp_path / "m.gguf", {}, {"output.weight": raw}, lambda name, array: type_)
    reader = reader_of(path)
    assert reader.tensors["lm_head.weight"].dtype == type_.name
    made = reader.read("lm_head.weight")
    assert made.element_size() == raw.nbytes // 24
    np.testing.assert_array_equal(made.double().numpy(), numbers)


def test_reading_copies_nothing_that_is_in_order(tmp_path: Path) -> None:
    raw = blocks(Type.Q4_K, (3, 8, 256))
    stored = {"blk.0.ffn_gate_up_exps.weight": raw, "output.weight": raw[0]}
    path = write_gguf(tmp_path / "m.gguf", MIXTRAL, stored, lambda name, array: Type.Q4_K)
    reader = reader_of(path)
    first = reader.read("lm_head.weight").data_ptr()
    assert reader.read("lm_head.weight").data_ptr() == first
    gate = reader.read("model.layers.0.block_sparse_moe.experts.1.w1.weight")
    up = reader.read("model.layers.0.block_sparse_moe.experts.1.w3.weight")
    assert up.data_ptr() - gate.data_ptr() == 4 * 144
    np.testing.assert_array_equal(torch.cat([gate, up]).numpy(), raw[1])


def test_the_factors_beside_nvfp4_blocks_stand_beside_each_weight(tmp_path: Path) -> None:
    stored = {
        "output.weight": blocks(Type.NVFP4, (4, 64)),
        "output.scale": np.array([0.5], dtype=np.float32),
        "output.input_scale": np.array([3.0], dtype=np.float32),
        "blk.0.attn_q.weight": blocks(Type.NVFP4, (64, 64)),
        "blk.0.attn_q.scale": np.array([0.25], dtype=np.float32),
        "blk.0.ffn_gate_up_exps.weight": blocks(Type.NVFP4, (3, 8, 64)),
        "blk.0.ffn_gate_up_exps.scale": np.array([2.0, 3.0, 4.0], dtype=np.float32),
    }
    path = write_gguf(
        tmp_path / "m.gguf",
        MIXTRAL,
        stored,
        lambda name, array: Type.NVFP4 if name.endswith(".weight") else Type.F32,
    )
    reader = reader_of(path)
    factors = {name: reader.read(name).tolist() for name in reader.tensors if name.endswith(".scale")}
    assert factors == {
        "lm_head.scale": [0.5],
        "model.layers.0.self_attn.q_proj.scale": [0.25],
        **{
            f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.scale": [2.0 + expert]
            for expert in range(3)
            for part in ("w1", "w3")
        },
    }
    assert all(reader.tensors[name].shape == (1,) for name in factors)
    assert not any("input_scale" in name for name in reader.tensors)
    assert len(reader.tensors) == 2 * len(factors)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mixtral", {}),
    ],
)
def test_every_tensor_of_a_written_checkpoint_comes_back(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = write_checkpoint(tmp_path / "hf", family, **options)
    reader = GgufReader(open_checkpoint(str(write_llama_gguf(tmp_path / "m.gguf", source))))
    original = load_file(source / "model.safetensors")
    assert set(reader.tensors) == set(original)
    for name, tensor in original.items():
        assert torch.equal(reader.read(name), tensor), name


def test_q_and_k_equal_those_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = write_checkpoint(tmp_path / "hf", "llama")
    # A name makes transformers look for Mistral in it, and it must be there.
    file = write_llama_gguf(tmp_path / "m.gguf", source, metadata={"general.name": "tiny"})
    model = AutoModelForCausalLM.from_pretrained(source)
    expected = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    reader = GgufReader(open_checkpoint(str(file)))
    assert set(reader.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor), name
    stored = torch.from_numpy(gguf_tensors(source)["blk.0.attn_q.weight"])
    assert not torch.equal(stored, expected["model.layers.0.self_attn.q_proj.weight"])


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", "mixtral")
    tensors = gguf_tensors(source)
    write_gguf(tmp_path / "m.gguf", llama_metadata(source), tensors, split_max_tensors=10)
    last = max(tmp_path.glob("m-*.gguf"))
    reader = GgufReader(open_checkpoint(str(last)))
    original = load_file(source / "model.safetensors")
    assert set(reader.tensors) == set(original)
    assert len({info.file for info in reader.tensors.values()}) == len(list(tmp_path.glob("m-*.gguf"))) > 2
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in original.items())


@pytest.mark.parametrize(
    "name", ["blk.0.ssm_a", "enc.blk.0.attn_q.weight", "blk.0.ffn_gate.7.weight", "x.scale"]
)
def test_tensors_of_other_models_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {name: np.ones((8, 8), dtype=np.float32)})
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} .*m\.gguf .* no LlamaForCausalLM"):
        reader_of(path)


@pytest.mark.parametrize(
    ("name", "rows", "why"),
    [
        ("attn_q", 12, "its 12 rows are no 4 heads"),
        ("attn_qkv", 100, r"its 100 rows are no 64 \+ 32 \+ 32"),
        ("ffn_gate_up_exps", 7, "its 7 rows are no two halves"),
    ],
)
def test_rows_that_do_not_fit_the_config_are_refused(tmp_path: Path, name: str, rows: int, why: str) -> None:
    shape = (3, rows, 8) if "exps" in name else (rows, 8)
    tensors = {f"blk.0.{name}.weight": np.ones(shape, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=rf"{name}\.weight in .*m\.gguf: {why}"):
        reader_of(write_gguf(tmp_path / "m.gguf", MIXTRAL, tensors))


def test_stacks_of_experts_that_are_none_are_refused(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_down_exps.weight": np.ones(8, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"ffn_down_exps\.weight \[8\] in .*m\.gguf is no vector"):
        reader_of(write_gguf(tmp_path / "m.gguf", MIXTRAL, tensors))


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"output.weight": np.ones((8, 8), dtype=np.float32)})
    reader = reader_of(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"Cannot read .*m\.gguf"):
        reader.read("lm_head.weight")


def test_the_rope_frequencies_belong_to_the_config(tmp_path: Path) -> None:
    tensors = {
        "rope_freqs.weight": np.ones(8, dtype=np.float32),
        "output_norm.weight": np.ones(8, np.float32),
    }
    reader = reader_of(write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert list(reader.tensors) == ["model.norm.weight"]


def test_what_must_be_decoded_and_cannot_be_is_refused_by_tensor_type_and_file(tmp_path: Path) -> None:
    raw = blocks(Type.Q8_K, (256,))
    path = write_gguf(tmp_path / "m.gguf", {}, {"output_norm.weight": raw}, lambda name, array: Type.Q8_K)
    reader = reader_of(path)
    with pytest.raises(CheckpointError, match=r"output_norm\.weight in .*m\.gguf has type Q8_K"):
        reader.read("model.norm.weight")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"output.weight": np.ones((8, 512), dtype=np.float32)})
    reader = reader_of(path)
    reader.read("lm_head.weight")
    path.write_bytes(path.read_bytes()[: math.floor(path.stat().st_size - 100)])
    with pytest.raises(CheckpointError, match=r"m\.gguf ended within the tensor output\.weight"):
        reader.read("lm_head.weight")
