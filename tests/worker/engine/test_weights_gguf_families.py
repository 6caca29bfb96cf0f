"""GGUF of every family, as llama.cpp's converter writes it: names, orders, values, and what is computed."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from moebius_worker.engine.weights.gguf import GgufReader
from tests.worker.checkpoint.gguf_files import Type, write_gguf
from tests.worker.checkpoint.gguf_models import FAMILIES, converted, original_model
from tests.worker.engine.models.harness import TOLERANCE, Texts, load


def by_expert(original: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state as it is saved, told with a tensor a projection and expert, and with Qwen 3.5's projections."""
    told: dict[str, torch.Tensor] = {}
    for name, tensor in original.items():
        path, _, last = name.rpartition(".experts.")
        if path and last.startswith(("gate_up_proj", "down_proj")):
            # gpt-oss alone has inputs first, gate and up in turns, and biases.
            gpt_oss = path.endswith("mlp")
            kind = "bias" if last.endswith("_bias") else "weight"
            names = ("gate_proj", "up_proj") if last.startswith("gate_up") else ("down_proj",)
            count = len(names)
            for expert, stored in enumerate(tensor):
                matrix = stored.T if gpt_oss and kind == "weight" else stored
                parts = [matrix[i::count] for i in range(count)] if gpt_oss else matrix.chunk(count)
                for part, rows in zip(names, parts, strict=True):
                    told[f"{path}.experts.{expert}.{part}.{kind}"] = rows
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tensors_equal_those_that_were_converted(tmp_path: Path, family: str) -> None:
    original_model(family).save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    expected = by_expert(load_file(tmp_path / "hf" / "model.safetensors"))
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


def contents(source: Path) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """A file's architecture, metadata and tensors, as the library reads them."""
    reader = gguf.GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return metadata.pop("general.architecture"), metadata, {t.name: np.array(t.data) for t in reader.tensors}


def opened(path: Path, architecture: str, *of: Any) -> GgufReader:
    """A reader of a file of this metadata, these tensors, and types if they are given."""
    return GgufReader(open_checkpoint(str(write_gguf(path, *of, architecture=architecture))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type_", [Type.Q4_0, Type.BF16], ids=lambda type_: type_.name)
def test_stored_rows_take_the_same_order_as_numbers(tmp_path: Path, family: str, type_: Type) -> None:
    def kept(name: str, array: np.ndarray) -> Type:
        matrix = array.ndim > 1 and array.shape[-1] % 32 == 0 and "conv1d" not in name
        return type_ if matrix else Type.F32

    def decoded(name: str, array: np.ndarray) -> np.ndarray:
        stored = gguf.quants.quantize(array, kept(name, array))
        return gguf.quants.dequantize(stored, kept(name, array)).reshape(array.shape)

    architecture, metadata, tensors = contents(converted(family, tmp_path))
    numbers = {name: decoded(name, array) for name, array in tensors.items()}
    stored = opened(tmp_path / "q.gguf", architecture, metadata, tensors, kept)
    plain = opened(tmp_path / "p.gguf", architecture, metadata, numbers)
    assert stored.tensors.keys() == plain.tensors.keys()
    blocks = 0
    for name, info in stored.tensors.items():
        raw, expected = stored.read(name), plain.read(name)
        assert info.shape == tuple(expected.shape)
        if info.dtype == "Q4_0":
            blocks += 1
            assert raw.dtype == torch.uint8
            assert raw.shape == (info.shape[0], info.shape[1] // 32 * 18)
            raw = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), Type.Q4_0))
        assert torch.equal(raw.float(), expected), name
    assert type_ != Type.Q4_0 or blocks > len(stored.tensors) / 4


COMPUTED = [family for family in FAMILIES if family not in ("deepseek_v2", "ministral3")]


@pytest.mark.parametrize("family", COMPUTED)
def test_the_logits_are_those_of_the_model_that_was_converted(tmp_path: Path, family: str) -> None:
    texts = Texts(load(converted(family, tmp_path)), original_model(family).eval(), [30])
    for count in (17, 1, 1, 5):
        assert texts.step({0: count}) < TOLERANCE


@pytest.mark.parametrize("family", COMPUTED)
def test_the_logits_of_stored_blocks_are_those_of_their_numbers(tmp_path: Path, family: str) -> None:
    architecture, metadata, tensors = contents(converted(family, tmp_path))

    def kept(name: str, array: np.ndarray) -> Type:
        blocks = array.ndim > 1 and array.shape[-1] % 32 == 0 and "conv1d" not in name
        return Type.Q8_0 if blocks else Type.F32

    numbers = {
        name: gguf.quants.dequantize(gguf.quants.quantize(array, Type.Q8_0), Type.Q8_0)
        if kept(name, array) == Type.Q8_0
        else array
        for name, array in tensors.items()
    }
    logits = []
    for name, stored, types in (("q", tensors, (kept,)), ("p", numbers, ())):
        path = write_gguf(tmp_path / f"{name}.gguf", metadata, stored, *types, architecture=architecture)
        runner = load(path)
        texts = Texts(runner, original_model(family).eval(), [20])
        logits.append(runner.step([texts.slice(0, 20)]).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


OUT_PROJ = "model.layers.0.linear_attn.out_proj.weight"


def test_columns_whose_blocks_would_break_are_decoded(tmp_path: Path) -> None:
    def kept(name: str, array: np.ndarray) -> Type:
        return Type.Q8_0 if name == "blk.0.ssm_out.weight" else Type.F32

    architecture, metadata, tensors = contents(converted("qwen3_5", tmp_path))
    assert opened(tmp_path / "b.gguf", architecture, metadata, tensors, kept).tensors[OUT_PROJ].dtype == "F32"


@pytest.mark.parametrize(
    ("type_", "head"), [(Type.Q8_0, 32), (Type.Q4_1, 64), (Type.Q4_K, 256), (Type.NVFP4, 128)]
)
def test_columns_of_whole_blocks_move_as_blocks(tmp_path: Path, type_: Type, head: int) -> None:
    size, nbytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(0).integers(0, 256, (3, 4 * head // size * nbytes), dtype=np.uint8)
    tensors = {"blk.0.ssm_out.weight": raw}
    path = write_gguf(tmp_path / "m.gguf", {}, tensors, lambda name, array: type_, "qwen35")
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": head}
    reader = GgufReader(Checkpoint(path, "gguf", {"num_hidden_layers": 1, **heads}, {}, "test"))
    assert reader.tensors[OUT_PROJ].dtype == type_.name
    grouped = raw.reshape(3, 2, 2, -1).swapaxes(1, 2).reshape(3, -1)
    np.testing.assert_array_equal(reader.read(OUT_PROJ).numpy(), grouped)


def test_value_heads_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
    tensors = {"blk.0.attn_gate.weight": np.ones((31, 8), dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", {}, tensors, architecture="qwen35")
    with pytest.raises(CheckpointError, match=r"attn_gate\.weight in .* its 31 are no 0 and 4 heads of 8"):
        GgufReader(Checkpoint(path, "gguf", {"num_hidden_layers": 1, **heads}, {}, "test"))


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    source = converted("qwen3_moe", tmp_path)
    architecture, metadata, more = contents(source)
    more |= {name.replace("blk.1.", "blk.2."): array for name, array in more.items() if "blk.1." in name}
    more["blk.2.nextn.eh_proj.weight"] = np.ones((32, 64), dtype=np.float32)
    metadata |= {"qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1}
    names = opened(tmp_path / "mtp.gguf", architecture, metadata, more).tensors.keys()
    assert names == GgufReader(open_checkpoint(str(source))).tensors.keys()


@pytest.mark.parametrize(
    ("family", "what"),
    [
        *[(family, "qkv") for family in ("llama", "qwen3", "qwen3_moe", "minimax_m2")],
        *[(family, "experts") for family in ("mixtral", "qwen3_moe", "minimax_m2")],
    ],
)
def test_tensors_that_the_converter_fused_are_divided(tmp_path: Path, family: str, what: str) -> None:
    """With its options --fuse-qkv and --fuse-gate-up-exps."""
    parts, whole, axis = {
        "qkv": (("attn_q", "attn_k", "attn_v"), "attn_qkv", 0),
        "experts": (("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1),
    }[what]
    source = converted(family, tmp_path)
    architecture, metadata, tensors = contents(source)
    for layer in range(2):
        arrays = [tensors.pop(f"blk.{layer}.{part}.weight") for part in parts]
        tensors[f"blk.{layer}.{whole}.weight"] = np.concatenate(arrays, axis=axis)
    made = opened(tmp_path / "f.gguf", architecture, metadata, tensors)
    expected = GgufReader(open_checkpoint(str(source)))
    assert made.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        assert torch.equal(made.read(name), expected.read(name)), name
        assert made.tensors[name].nbytes == expected.tensors[name].nbytes


def test_older_files_of_qwen_3_next_have_packed_projections(tmp_path: Path) -> None:
    source = converted("qwen3_next", tmp_path)
    architecture, metadata, tensors = contents(source)
    del tensors["blk.0.attn_gate.weight"], tensors["blk.0.attn_qkv.weight"]
    packed = original_model("qwen3_next").state_dict()["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    tensors["blk.0.ssm_in.weight"] = packed.numpy()
    made = opened(tmp_path / "o.gguf", architecture, metadata, tensors)
    expected = GgufReader(open_checkpoint(str(source)))
    assert made.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        assert torch.equal(made.read(name), expected.read(name)), name
    tensors["blk.0.ssm_in.weight"] = packed.numpy()[:-1]
    with pytest.raises(CheckpointError, match=r"its 95 rows are no 8 \+ 8 \+ 16 \+ 16 for 2 key heads"):
        opened(tmp_path / "x.gguf", architecture, metadata, tensors)


def test_encoders_for_pictures_and_sound_are_left_out(tmp_path: Path) -> None:
    source = converted("gemma4_moe", tmp_path)
    architecture, metadata, tensors = contents(source)
    metadata |= {"gemma4.vision.block_count": 2, "gemma4.audio.block_count": 2}
    for name in ("v.blk.0.attn_q.weight", "a.conv1d.0.weight", "mm.input_projection.weight"):
        tensors[name] = np.ones((8, 8), dtype=np.float32)
    made = opened(tmp_path / "v.gguf", architecture, metadata, tensors)
    assert made.tensors.keys() == GgufReader(open_checkpoint(str(source))).tensors.keys()


def test_kv_b_may_be_whole_but_not_half(tmp_path: Path) -> None:
    source = converted("deepseek_v3", tmp_path)
    expected = GgufReader(open_checkpoint(str(source)))
    architecture, metadata, tensors = contents(source)
    halves = [name for name in tensors if "attn_k_b" in name or "attn_v_b" in name]
    kept = {name: tensors.pop(name) for name in halves}
    for layer in range(2):
        whole = expected.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight").numpy()
        tensors[f"blk.{layer}.attn_kv_b.weight"] = whole
    made = opened(tmp_path / "w.gguf", architecture, metadata, tensors)
    assert made.tensors.keys() == expected.tensors.keys()
    tensors["blk.1.attn_k_b.weight"] = kept["blk.1.attn_k_b.weight"]
    with pytest.raises(CheckpointError, match=r"h\.gguf has blk\.1\.attn_k_b\.weight, but no attn_v_b"):
        opened(tmp_path / "h.gguf", architecture, metadata, tensors)


def test_a_tensor_that_is_there_in_two_ways_is_refused(tmp_path: Path) -> None:
    architecture, metadata, tensors = contents(converted("deepseek_v3", tmp_path))
    tensors["blk.1.attn_kv_b.weight"] = np.ones((112, 16), dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"t\.gguf has model\.layers\.1\.self_attn\.kv_b_proj.* twice"):
        opened(tmp_path / "t.gguf", architecture, metadata, tensors)


def test_gemma_4s_router_keeps_its_own_scales(tmp_path: Path) -> None:
    """Which have the names of NVFP4's factors; that of `ffn_down_exps` is in the router's already."""
    reader = GgufReader(open_checkpoint(str(converted("gemma4_moe", tmp_path))))
    assert reader.tensors["model.layers.0.router.scale"].shape == (32,)
    assert reader.tensors["model.layers.0.router.per_expert_scale"].shape == (4,)
    assert not any("proj.scale" in name for name in reader.tensors)
