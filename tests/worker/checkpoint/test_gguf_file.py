"""The header reader against PyPI's `gguf`, and against files that are cut, damaged or foreign."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.file import read_gguf
from tests.worker.checkpoint.gguf_files import Type, write_gguf

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.ones((2, 3, 32), dtype=np.float32),
    "c.bias": np.ones(5, dtype=np.float32),
}


def types(name: str, array: np.ndarray) -> Type:
    return Type.Q8_0 if name == "b.weight" else Type.F32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", {"llama.block_count": 2}, TENSORS, types)


def test_metadata_of_every_type_and_tensor_table_equal_the_librarys(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"uint8": 255, "int8": -1, "uint16": 65535, "int16": -2, "uint32": 4_000_000_000, "int32": -3}
    numbers |= {"uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True}
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_string("x.string", "日本 🙂")
    writer.add_array("x.strings", ["a", "", "ü"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -1.5])
    writer.add_array("x.bools", [True, False])
    for name, array in TENSORS.items():
        type_ = types(name, array)
        writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header, library = read_gguf(path), gguf.GGUFReader(path)

    expected = {key: field.contents() for key, field in library.fields.items() if not key.startswith("GGUF.")}
    assert dict(header.metadata) == expected
    assert len(expected) == len(numbers) + 6
    table = [
        (t.name, tuple(int(n) for n in t.shape[::-1]), t.tensor_type, t.data_offset, t.n_bytes)
        for t in library.tensors
    ]
    assert [(t.name, t.shape, t.type, t.offset, t.nbytes) for t in header.tensors.values()] == table


def test_a_file_cut_anywhere_is_refused_with_its_name(file: Path) -> None:
    content = file.read_bytes()
    cut = file.with_name("cut.gguf")
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        # The writer pads the last tensor: what is lost there is lost by nobody.
        if length >= read_gguf(file).tensors["c.bias"].offset + 20:
            break
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_a_truncated_tensor_is_named(file: Path) -> None:
    offset = read_gguf(file).tensors["b.weight"].offset
    file.write_bytes(file.read_bytes()[: offset + 10])
    with pytest.raises(CheckpointError, match=r"truncated: tensor b\.weight"):
        read_gguf(file)


def patched(file: Path, position: int, value: int) -> Path:
    content = bytearray(file.read_bytes())
    content[position : position + 4] = struct.pack("<I", value)
    file.write_bytes(content)
    return file


def test_an_unknown_tensor_type_is_refused_by_tensor_type_and_file(file: Path) -> None:
    position = file.read_bytes().index(b"a.weight") + len(b"a.weight") + 4 + 2 * 8
    with pytest.raises(CheckpointError, match=r"Tensor a\.weight in .*model\.gguf has the type 99"):
        read_gguf(patched(file, position, 99))


def test_rows_that_hold_no_whole_blocks_are_refused(file: Path) -> None:
    position = file.read_bytes().index(b"a.weight") + len(b"a.weight") + 4 + 2 * 8
    with pytest.raises(CheckpointError, match=r"a\.weight .* rows have 4 elements"):
        read_gguf(patched(file, position, Type.Q8_0))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [(0, 0, "not a GGUF file"), (4, 1, "version 1 GGUF"), (4, 0x03000000, "big-endian")],
)
def test_foreign_files_are_refused(file: Path, position: int, value: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(patched(file, position, value))


def test_an_absurd_count_ends_in_an_error_and_not_in_memory(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[16:24] = struct.pack("<Q", 1 << 60)
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_gguf(file)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", {"llama.block_count": 2}, TENSORS, types, split_max_tensors=1)
    return [tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_shards_are_read_as_one_model_whichever_is_given(shards: list[Path], given: int) -> None:
    model = read_gguf(shards[given])
    assert sorted(model.tensors) == sorted(TENSORS)
    assert {tensor.file for tensor in model.tensors.values()} == set(shards)
    assert model.metadata["llama.block_count"] == 2


def test_missing_shards_are_named(shards: list[Path]) -> None:
    shards[0].unlink()
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=r"shards m-00001-of-00003\.gguf, m-00003-of-00003\.gguf next"):
        read_gguf(shards[1])


def test_a_shard_that_lost_its_name_is_refused(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"one of the 3 .* must be named NAME-00001-of-00003\.gguf"):
        read_gguf(renamed)


def test_shards_of_other_models_are_refused(shards: list[Path], tmp_path: Path) -> None:
    content = shards[1].read_bytes()
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf says that it is shard 2 "):
        read_gguf(shards[0])

    shards[1].write_bytes(content.replace(b"b.weight", b"a.weight"))
    with pytest.raises(CheckpointError, match=r"a\.weight is both in .*00001.* and in .*00002"):
        read_gguf(shards[0])

    shards[1].write_bytes(content)
    first = shards[0].read_bytes()
    key = b"split.tensors.count"
    position = first.index(key) + len(key) + 4
    shards[0].write_bytes(first[:position] + struct.pack("<I", 4) + first[position + 4 :])
    with pytest.raises(CheckpointError, match="3 shards hold 4 tensors, but they hold 3"):
        read_gguf(shards[2])


def test_an_odd_alignment_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": 12}, TENSORS, types)
    with pytest.raises(CheckpointError, match="alignment is 12"):
        read_gguf(path)


def header(metadata: bytes, keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, keys) + metadata


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


COUNT = text(b"split.count")
DAMAGED = {
    "arrays in arrays without an end": text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
    "a count of shards in words": COUNT + struct.pack("<I", 8) + text(b"two"),
    "a list of counts": COUNT + struct.pack("<IIQI", 9, 4, 1, 5),
    "more shards than a name can have": COUNT + struct.pack("<IQ", 10, 1 << 60),
    "more strings than the file holds": text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 50),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_absurd_metadata_is_refused_with_the_files_name(tmp_path: Path, what: str) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(header(DAMAGED[what]))
    with pytest.raises(CheckpointError, match=r"absurd\.gguf"):
        read_gguf(path)


@pytest.mark.parametrize("dimensions", [(), (0,), (4, 0), (0, 1 << 40), (1,) * 5])
def test_tensors_without_elements_and_of_too_many_dimensions_are_refused(
    tmp_path: Path, dimensions: tuple[int, ...]
) -> None:
    """What has no elements has no bytes either, however many experts it tells of."""
    path = tmp_path / "odd.gguf"
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    table = text(b"blk.0.x") + sizes + struct.pack("<IQ", 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + bytes(64))
    with pytest.raises(
        CheckpointError, match=rf"odd\.gguf is damaged: its tensor blk\.0\.x has {len(dimensions)} "
    ):
        read_gguf(path)
