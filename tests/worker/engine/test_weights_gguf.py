"""GGUF weights: every block format, llama.cpp's order of rows, stacked experts, refusals."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from moebius_worker.engine.weights import open_weights
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf.files import (
    Type,
    gguf_tensors,
    llama_metadata,
    write_gguf,
    write_llama_gguf,
)

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}
NOT_DECODED = {Type.Q8_1, Type.Q8_K, Type.Q1_0, Type.I8, Type.I16, Type.I32, Type.I64}


def checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path, "gguf", CONFIG, {}, "test")


def blocks(type_: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of `type_`: quantised numbers where `gguf` can quantise, else random bytes, which are valid."""
    source = np.random.default_rng(type_.value)
    if type_ == Type.F64:
        return source.standard_normal(shape).view(np.uint8)
    try:
        return gguf.quants.quantize(source.standard_normal(shape, dtype=np.float32), type_).view(np.uint8)
    except NotImplementedError:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        return source.integers(0, 256, (*shape[:-1], shape[-1] // block_size * block_bytes), dtype=np.uint8)


# Random bytes make a scale here and there that is no number; it must come out as `gguf` has it.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("type_", sorted(set(Type) - NOT_DECODED), ids=lambda type_: type_.name)
def test_every_type_is_read_as_gguf_decodes_it(tmp_path: Path, type_: Type) -> None:
    stored = {
        "output.weight": blocks(type_, (6, 512)),
        "blk.0.ffn_down_exps.weight": blocks(type_, (3, 4, 256)),
        "output_norm.weight": np.ones(8, dtype=np.float32),
    }
    types = {"output_norm.weight": Type.F32}
    path = write_gguf(tmp_path / "m.gguf", {}, stored, lambda name, array: types.get(name, type_))
    library = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    decoded = {
        name: tensor.data.astype(np.float32)
        if type_ == Type.F64
        else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for name, tensor in library.items()
    }
    reader = open_weights(checkpoint(path))

    assert list(reader.tensors) == [
        "lm_head.weight",
        *(f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(3)),
        "model.norm.weight",
    ]
    expected = {"lm_head.weight": decoded["output.weight"], "model.norm.weight": np.ones(8)}
    for expert in range(3):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"
        expected[name] = decoded["blk.0.ffn_down_exps.weight"][expert]
    for name, values in expected.items():
        tensor = reader.read(name)
        assert tuple(tensor.shape) == reader.tensors[name].shape == values.shape
        np.testing.assert_array_equal(tensor.float().numpy(), values)
    assert np.isfinite(expected["lm_head.weight"]).mean() > 0.8
    assert reader.tensors["lm_head.weight"].dtype == type_.name
    total = sum(info.nbytes for info in reader.tensors.values())
    assert total == sum(tensor.n_bytes for tensor in library.values())


@pytest.mark.parametrize("type_", sorted(NOT_DECODED), ids=lambda type_: type_.name)
def test_other_types_are_refused_by_tensor_type_and_file(tmp_path: Path, type_: Type) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.zeros((2, 512 // block_size * block_bytes), dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", {}, {"output.weight": raw}, lambda name, array: type_)
    reader = open_weights(checkpoint(path))
    with pytest.raises(CheckpointError, match=rf"output\.weight in .*m\.gguf has type {type_.name}"):
        reader.read("lm_head.weight")


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
def test_every_tensor_equals_the_checkpoints_that_was_converted(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = write_checkpoint(tmp_path / "hf", family, **options)
    reader = open_weights(open_checkpoint(str(write_llama_gguf(tmp_path / "m.gguf", source))))
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
    reader = open_weights(open_checkpoint(str(file)))
    assert set(reader.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(reader.read(name), tensor), name
    stored = torch.from_numpy(gguf_tensors(source)["blk.0.attn_q.weight"])
    assert not torch.equal(stored, expected["model.layers.0.self_attn.q_proj.weight"])


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "hf", "mixtral")
    tensors = gguf_tensors(source)
    write_gguf(tmp_path / "m.gguf", llama_metadata(source), tensors, split_max_tensors=10)
    first = min(tmp_path.glob("m-*.gguf"))
    reader = open_weights(open_checkpoint(str(first)))
    original = load_file(source / "model.safetensors")
    assert set(reader.tensors) == set(original)
    assert len({info.file for info in reader.tensors.values()}) == len(list(tmp_path.glob("m-*.gguf"))) > 2
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in original.items())


def test_the_factors_beside_nvfp4_blocks_are_applied(tmp_path: Path) -> None:
    stored = {
        "output.weight": blocks(Type.NVFP4, (4, 64)),
        "output.scale": np.array([0.5], dtype=np.float32),
        "output.input_scale": np.array([3.0], dtype=np.float32),
        "blk.0.ffn_up_exps.weight": blocks(Type.NVFP4, (2, 4, 64)),
        "blk.0.ffn_up_exps.scale": np.array([2.0, 3.0], dtype=np.float32),
    }
    path = write_gguf(
        tmp_path / "m.gguf",
        {},
        stored,
        lambda name, array: Type.NVFP4 if name.endswith(".weight") else Type.F32,
    )
    plain = gguf.quants.dequantize(stored["blk.0.ffn_up_exps.weight"], Type.NVFP4)
    reader = open_weights(checkpoint(path))
    assert len(reader.tensors) == 3
    for expert, factor in enumerate((2.0, 3.0)):
        read = reader.read(f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight")
        np.testing.assert_array_equal(read.numpy(), plain[expert] * factor)
    output = gguf.quants.dequantize(stored["output.weight"], Type.NVFP4)
    np.testing.assert_array_equal(reader.read("lm_head.weight").numpy(), output * 0.5)


def test_tensors_of_other_models_are_refused_by_name(tmp_path: Path) -> None:
    for name in (
        "blk.0.attn_qkv.weight",
        "enc.blk.0.attn_q.weight",
        "blk.0.ffn_gate.7.weight",
        "output.scale",
    ):
        path = write_gguf(tmp_path / "m.gguf", {}, {name: np.ones((8, 8), dtype=np.float32)})
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_weights(checkpoint(path))


def test_rows_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": np.ones((12, 8), dtype=np.float32)}
    with pytest.raises(CheckpointError, match="12 rows are no 4 heads"):
        open_weights(checkpoint(write_gguf(tmp_path / "m.gguf", {}, tensors)))


def test_the_rope_frequencies_belong_to_the_config(tmp_path: Path) -> None:
    tensors = {
        "rope_freqs.weight": np.ones(8, dtype=np.float32),
        "output_norm.weight": np.ones(8, np.float32),
    }
    reader = open_weights(checkpoint(write_gguf(tmp_path / "m.gguf", {}, tensors)))
    assert list(reader.tensors) == ["model.norm.weight"]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"output.weight": np.ones((8, 512), dtype=np.float32)})
    reader = open_weights(checkpoint(path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"m\.gguf ended within the tensor output\.weight"):
        reader.read("lm_head.weight")
