"""Weights in safetensors: one file, shards, damaged files, and quantisations that are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.engine.weights.reader import WeightReader

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "c": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "d": torch.randn(4, 2).to(torch.float8_e4m3fn),
}


def directory(path: Path, shards: dict[str, dict[str, torch.Tensor]], **config: object) -> Path:
    path.mkdir(exist_ok=True)
    keys = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **config}
    (path / "config.json").write_text(json.dumps(keys))
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    return path


def write_index(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def reader_of(path: Path) -> WeightReader:
    return open_weights(open_checkpoint(str(path)))[0]


def sharded(path: Path) -> Path:
    first, second = {name: TENSORS[name] for name in "ac"}, {name: TENSORS[name] for name in "bd"}
    directory(path, {"x-1.safetensors": first, "x-2.safetensors": second})
    weight_map = {
        "a": "x-1.safetensors",
        "c": "x-1.safetensors",
        "b": "x-2.safetensors",
        "d": "x-2.safetensors",
    }
    write_index(path, weight_map)
    return path


@pytest.mark.parametrize("shards", [1, 2])
def test_every_tensor_is_read_as_it_was_written(tmp_path: Path, shards: int) -> None:
    path = sharded(tmp_path) if shards == 2 else directory(tmp_path, {"model.safetensors": TENSORS})
    reader = reader_of(path)
    assert set(reader.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        read, info = reader.read(name), reader.tensors[name]
        assert read.dtype == tensor.dtype
        assert torch.equal(read.float(), tensor.float())
        assert info.shape == tuple(tensor.shape)
        assert info.nbytes == tensor.numel() * tensor.element_size()
        assert Path(info.file).is_file()
    assert [info.dtype for _, info in sorted(reader.tensors.items())] == ["F32", "BF16", "F16", "F8_E4M3"]


def test_tensors_come_file_by_file_in_the_order_of_the_file(tmp_path: Path) -> None:
    reader = reader_of(sharded(tmp_path))
    files = [info.file for info in reader.tensors.values()]
    assert files == sorted(files)
    assert len(set(files)) == 2


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    save_file({"z": torch.ones(1)}, sharded(tmp_path) / "extra.safetensors")
    assert "z" not in reader_of(tmp_path).tensors


def test_consolidated_files_are_left_alone(tmp_path: Path) -> None:
    path = directory(
        tmp_path, {"model.safetensors": TENSORS, "consolidated.safetensors": {"z": torch.ones(1)}}
    )
    assert set(reader_of(path).tensors) == set(TENSORS)


def test_the_authors_own_index_is_left_alone(tmp_path: Path) -> None:
    """Mistral's repositories have both."""
    path = sharded(tmp_path)
    own = {"weight_map": {"tok_embeddings.weight": "consolidated-00001-of-00002.safetensors"}}
    (path / "consolidated.safetensors.index.json").write_text(json.dumps(own))
    assert set(reader_of(path).tensors) == set(TENSORS)


@pytest.mark.parametrize(
    "where", ["../other.safetensors", "{}/other.safetensors", "down/other.safetensors", ""]
)
def test_an_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path, where: str) -> None:
    path = directory(tmp_path / "model", {})
    for place in (tmp_path, path / "down"):
        place.mkdir(exist_ok=True)
        save_file(TENSORS, place / "other.safetensors")
    write_index(path, dict.fromkeys(TENSORS, where.format(tmp_path)))
    with pytest.raises(CheckpointError, match=r"index\.json names .*, which is not next to it"):
        reader_of(path)


def test_a_shard_may_be_a_link(tmp_path: Path) -> None:
    """So are those in the Hub's cache."""
    path = directory(tmp_path / "model", {})
    save_file(TENSORS, tmp_path / "blob")
    (path / "model.safetensors").symlink_to(tmp_path / "blob")
    write_index(path, dict.fromkeys(TENSORS, "model.safetensors"))
    assert torch.equal(reader_of(path).read("a"), TENSORS["a"])


def test_a_file_cut_anywhere_is_refused_with_its_name(tmp_path: Path) -> None:
    file = directory(tmp_path, {"model.safetensors": TENSORS}) / "model.safetensors"
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
            reader_of(tmp_path)


def test_a_damaged_header_is_refused_with_its_name(tmp_path: Path) -> None:
    file = directory(tmp_path, {"model.safetensors": TENSORS}) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\x00{]"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        reader_of(tmp_path)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    file = directory(tmp_path, {"model.safetensors": TENSORS}) / "model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        reader_of(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "x-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks x-2\.safetensors"):
        reader_of(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is no index"):
        reader_of(tmp_path)


def test_an_index_that_is_wrong_is_refused(tmp_path: Path) -> None:
    write_index(sharded(tmp_path), {"a": "x-1.safetensors", "b": "x-1.safetensors", "d": "x-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"x-1\.safetensors holds b, but it does not"):
        reader_of(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path, {"one.safetensors": TENSORS, "two.safetensors": {"a": TENSORS["a"]}})
    with pytest.raises(CheckpointError, match=r"a is both in .*one\.safetensors and in .*two\.safetensors"):
        reader_of(path)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    path = directory(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files\.$"):
        reader_of(path)
    (path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="Pickled weights are not read"):
        reader_of(path)


def test_a_quantisation_without_a_scheme_is_refused_by_name(tmp_path: Path) -> None:
    declared = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path = directory(tmp_path, {"model.safetensors": TENSORS}, quantization_config=declared)
    with pytest.raises(
        CheckpointError, match=r"quantised with bitsandbytes, which is not supported.*compressed-tensors"
    ):
        reader_of(path)
