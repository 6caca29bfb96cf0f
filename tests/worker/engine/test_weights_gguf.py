"""GGUF weights: every block format, the orders and values that llama.cpp's converter changes, refusals."""

import math
from collections.abc import Callable
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
from tests.worker.checkpoint.gguf_models import FAMILIES, converted, original_model

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


def quantize(array: np.ndarray, type_: Type) -> np.ndarray:
    return gguf.quants.quantize(array, type_).view(np.uint8)


def blocks(type_: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes: every one is a block of some numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[type_]
    source = np.random.default_rng(type_.value)
    return source.integers(0, 256, (*shape[:-1], shape[-1] // size * nbytes), dtype=np.uint8)


# --- every family, as llama.cpp's converter writes it -----------------------------------------------------


def by_expert(original: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state as it is saved, told with a tensor a projection and expert, and with Qwen 3.5's projections."""
    told: dict[str, torch.Tensor] = {}
    for name, tensor in original.items():
        path, _, last = name.rpartition("experts.")
        if path and last.startswith(("gate_up_proj", "down_proj")):
            # gpt-oss alone has inputs first, gate and up in turns, and biases.
            gpt_oss = path.endswith("mlp.")
            kind = "bias" if last.endswith("_bias") else "weight"
            for expert, stored in enumerate(tensor):
                matrix = stored.T if gpt_oss and kind == "weight" else stored
                names = ("gate_proj", "up_proj") if last.startswith("gate_up") else ("down_proj",)
                parts = [matrix[i :: len(names)] if gpt_oss else matrix.chunk(len(names))[i] for i in (0, -1)]
                for part, rows in zip(names, parts, strict=False):
                    told[f"{path}experts.{expert}.{part}.{kind}"] = rows
        elif name.endswith("in_proj_qkvz.weight"):
            # Two key heads of 8, four value heads of 8: of each key head q, k, v and z.
            q, k, v, z = tensor.reshape(2, 48, -1).split((8, 8, 16, 16), dim=1)
            told[name.replace("qkvz", "qkv")] = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            told[name.replace("qkvz", "z")] = z.flatten(0, 1)
        elif name.endswith("in_proj_ba.weight"):
            b, a = tensor.reshape(2, 2, 2, -1).unbind(1)
            told |= {name.replace("_ba", "_b"): b.flatten(0, 1), name.replace("_ba", "_a"): a.flatten(0, 1)}
        else:
            told[name] = tensor
    return told


def saved(family: str, directory: Path) -> dict[str, torch.Tensor]:
    original_model(family).save_pretrained(directory)  # type: ignore[operator]
    return by_expert(load_file(directory / "model.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tensors_equal_those_that_were_converted(tmp_path: Path, family: str) -> None:
    expected = saved(family, tmp_path / "hf")
    reader = GgufReader(open_checkpoint(str(converted(family, tmp_path))))
    assert reader.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        made = reader.read(name)
        assert reader.tensors[name].shape == tuple(made.shape) == tuple(tensor.shape), name
        assert reader.tensors[name].dtype == "F32"
        if name.endswith("A_log"):
            torch.testing.assert_close(made, tensor)
        else:
            assert torch.equal(made, tensor), name


def rewritten(source: Path, path: Path, quantized: Callable[[str, np.ndarray], Type], **extra: Any) -> Path:
    """The file with other types and further metadata."""
    reader = gguf.GGUFReader(source)
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    return write_gguf(path, metadata | extra, tensors, quantized, architecture)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type_", [Type.Q4_0, Type.BF16], ids=lambda type_: type_.name)
def test_stored_rows_take_the_same_order_as_numbers(tmp_path: Path, family: str, type_: Type) -> None:
    def quantized(name: str, array: np.ndarray) -> Type:
        matrix = array.ndim > 1 and array.shape[-1] % 32 == 0 and "conv1d" not in name
        return type_ if matrix else Type.F32

    def decoded(name: str, array: np.ndarray) -> np.ndarray:
        kept = quantized(name, array)
        return gguf.quants.dequantize(gguf.quants.quantize(array, kept), kept).reshape(array.shape)

    source = converted(family, tmp_path)
    stored = GgufReader(open_checkpoint(str(rewritten(source, tmp_path / "q.gguf", quantized))))
    library = gguf.GGUFReader(source)
    numbers = {tensor.name: decoded(tensor.name, np.array(tensor.data)) for tensor in library.tensors}
    metadata = {
        key: field.contents()
        for key, field in library.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    architecture = library.fields["general.architecture"].contents()
    plain_file = write_gguf(tmp_path / "p.gguf", metadata, numbers, architecture=architecture)
    plain = GgufReader(open_checkpoint(str(plain_file)))

    assert stored.tensors.keys() == plain.tensors.keys()
    kept = 0
    for name, info in stored.tensors.items():
        raw, expected = stored.read(name), plain.read(name)
        assert info.shape == tuple(expected.shape)
        if info.dtype == "Q4_0":
            kept += 1
            assert raw.dtype == torch.uint8
            assert raw.shape == (info.shape[0], info.shape[1] // 32 * 18)
            raw = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), Type.Q4_0))
        assert torch.equal(raw.float(), expected), name
    assert type_ != Type.Q4_0 or kept > len(stored.tensors) / 4


def test_columns_whose_blocks_would_break_are_decoded_and_others_move_as_blocks(tmp_path: Path) -> None:
    """Value heads of 8 break blocks of 32; heads of 32 and 64 do not, nor do those of 128 for NVFP4's 64."""
    source = converted("qwen3_5", tmp_path)

    def out_only(name: str, array: np.ndarray) -> Type:
        return Type.Q8_0 if name == "blk.0.ssm_out.weight" else Type.F32

    broken = GgufReader(open_checkpoint(str(rewritten(source, tmp_path / "b.gguf", out_only))))
    assert broken.tensors["model.layers.0.linear_attn.out_proj.weight"].dtype == "F32"

    name = "model.layers.0.linear_attn.out_proj.weight"
    for type_, head in ((Type.Q8_0, 32), (Type.Q4_1, 64), (Type.Q4_K, 256), (Type.NVFP4, 128)):
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": head}
        raw = blocks(type_, (3, 4 * head))
        path = write_gguf(
            tmp_path / "m.gguf",
            {},
            {"blk.0.ssm_out.weight": raw},
            lambda name, array, type_=type_: type_,
            architecture="qwen35",
        )
        reader = reader_of(path, **heads)
        assert reader.tensors[name].dtype == type_.name
        grouped = gguf.quants.dequantize(raw, type_).reshape(3, 2, 2, head).swapaxes(1, 2).reshape(3, -1)
        made = gguf.quants.dequantize(reader.read(name).numpy(), type_)
        np.testing.assert_array_equal(made, grouped)


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    source = converted("qwen3_moe", tmp_path)
    reader = gguf.GGUFReader(source)
    more = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    more |= {name.replace("blk.1.", "blk.2."): array for name, array in more.items() if "blk.1." in name}
    more["blk.2.nextn.eh_proj.weight"] = np.ones((32, 64), dtype=np.float32)
    metadata = {key: f.contents() for key, f in reader.fields.items() if key.startswith("qwen3moe.")}
    metadata |= {"qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "mtp.gguf", metadata, more, architecture="qwen3moe")
    names = GgufReader(open_checkpoint(str(path))).tensors.keys()
    assert names == GgufReader(open_checkpoint(str(source))).tensors.keys()


def fused(source: Path, path: Path, parts: tuple[str, ...], whole: str, axis: int) -> Path:
    """The file as the converter's options --fuse-qkv and --fuse-gate-up-exps make it."""
    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for layer in range(2):
        arrays = [tensors.pop(f"blk.{layer}.{part}.weight") for part in parts]
        tensors[f"blk.{layer}.{whole}.weight"] = np.concatenate(arrays, axis=axis)
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    return write_gguf(path, metadata, tensors, architecture=reader.fields["general.architecture"].contents())


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "minimax_m2"])
@pytest.mark.parametrize("what", ["qkv", "experts"])
def test_fused_tensors_are_divided(tmp_path: Path, family: str, what: str) -> None:
    if what == "experts" and family in ("llama", "qwen3"):
        pytest.skip("has no experts")
    source = converted(family, tmp_path)
    parts, whole, axis = {
        "qkv": (("attn_q", "attn_k", "attn_v"), "attn_qkv", 0),
        "experts": (("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1),
    }[what]
    made = GgufReader(open_checkpoint(str(fused(source, tmp_path / "f.gguf", parts, whole, axis))))
    expected = GgufReader(open_checkpoint(str(source)))
    assert made.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        assert torch.equal(made.read(name), expected.read(name)), name
    assert sum(info.nbytes for info in made.tensors.values()) == sum(
        info.nbytes for info in expected.tensors.values()
    )


def test_kv_b_may_be_whole(tmp_path: Path) -> None:
    source = converted("deepseek_v3", tmp_path)
    expected = GgufReader(open_checkpoint(str(source)))
    library = gguf.GGUFReader(source)
    tensors = {
        t.name: np.array(t.data) for t in library.tensors if "_k_b" not in t.name and "_v_b" not in t.name
    }
    for layer in range(2):
        whole = expected.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight").numpy()
        tensors[f"blk.{layer}.attn_kv_b.weight"] = whole
    metadata = {key: f.contents() for key, f in library.fields.items() if key.startswith("deepseek2.")}
    made = GgufReader(
        open_checkpoint(str(write_gguf(tmp_path / "w.gguf", metadata, tensors, architecture="deepseek2")))
    )
    assert made.tensors.keys() == expected.tensors.keys()
    del tensors["blk.1.attn_kv_b.weight"]
    tensors["blk.1.attn_k_b.weight"] = np.ones((4, 16, 16), dtype=np.float32)
    half = write_gguf(tmp_path / "h.gguf", metadata, tensors, architecture="deepseek2")
    with pytest.raises(
        CheckpointError, match=r"h\.gguf has blk\.1\.attn_k_b\.weight, but no attn_v_b\.weight"
    ):
        GgufReader(open_checkpoint(str(half)))


# --- types -------------------------------------------------------------------------------------------------


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


def test_gemma_4s_router_keeps_its_own_scales(tmp_path: Path) -> None:
    """Which have the names of NVFP4's factors; a factor of `ffn_down_exps` is multiplied into the router's."""
    reader = GgufReader(open_checkpoint(str(converted("gemma4_moe", tmp_path))))
    assert reader.tensors["model.layers.0.router.scale"].shape == (32,)
    assert reader.tensors["model.layers.0.router.per_expert_scale"].shape == (4,)
    assert not any("proj.scale" in name for name in reader.tensors)


# --- files -------------------------------------------------------------------------------------------------


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
    with pytest.raises(
        CheckpointError, match=name.replace(".", r"\.") + r" .*m\.gguf .* no LlamaForCausalLM"
    ):
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


def test_value_heads_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
    tensors = {"blk.0.attn_gate.weight": np.ones((31, 8), dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", {}, tensors, architecture="qwen35")
    with pytest.raises(CheckpointError, match=r"attn_gate\.weight in .* its 31 are no 0 and 4 heads of 8"):
        reader_of(path, **heads)


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
