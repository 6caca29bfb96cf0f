"""The user's table of tilings: who may use it, what stays in it, and what comes before what."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moebius_kernels.registry import Device
from moebius_kernels.tuning import tilings_digest, tilings_path

pytest.importorskip("triton")
from moebius_kernels.triton import dense_tiling, expert_tiling, tiling_tables
from moebius_kernels.triton.dense_tiling import DenseMeasurement, DenseShape
from moebius_kernels.triton.expert_tiling import ExpertShape, Measurement
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.triton.tune import keep

GPU = Device("cuda", "NVIDIA H200", (9, 0))
SHAPE = ExpertShape("int5", "int6", 60, 4, 1408, 352)
DENSE = DenseShape("int5", 352, 1408)
OWN = ExpertTiling(Tiling(8, 16, 128, 1, 2), Tiling(8, 32, 64, 2, 3, swap=False))
DECODES = {"experts": expert_tiling.measurement_of, "dense": dense_tiling.measurement_of}


@pytest.fixture
def here(monkeypatch, tmp_path: Path):
    """A GPU is here, with a cache that is empty. Returns where its table would be."""
    forget = expert_tiling._tables.cache_clear, dense_tiling._tables.cache_clear
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name=GPU.name, major=9, minor=0),
    )
    for clear in forget:
        clear()
    yield tilings_path(tmp_path, GPU)
    for clear in forget:
        clear()


def read(path: Path, device: Device = GPU):
    return tiling_tables.read_user_table(path, device, DECODES)


def test_the_path_tells_the_gpu():
    assert tilings_path(Path("/c"), GPU) == Path("/c/tilings/nvidia-h200-sm90.json")
    with pytest.raises(ValueError, match="CPU"):
        tilings_path(Path("/c"), Device("cpu", "CPU"))


def test_the_users_table_comes_first_then_the_shipped_one_then_the_rules(here):
    [shipped, *_] = expert_tiling.read_table(expert_tiling.TABLE)
    for shape in (SHAPE, shipped.shape):
        keep(here, GPU, Measurement(shape, 64, 1.0, OWN))
    assert expert_tiling.expert_tiling(64, SHAPE) == OWN
    assert expert_tiling.expert_tiling(64, shipped.shape) == OWN
    assert expert_tiling.expert_tiling(1, SHAPE) == expert_tiling.rules(1, SHAPE)
    assert expert_tiling.expert_tiling(shipped.tokens, shipped.shape) in (shipped.tiling, OWN)
    other = next(one for one in expert_tiling.read_table(expert_tiling.TABLE) if one.shape != shipped.shape)
    assert expert_tiling.expert_tiling(other.tokens, other.shape) == other.tiling


def test_dense_products_likewise(here):
    [shipped, *_] = dense_tiling.read_table(dense_tiling.TABLE)
    keep(here, GPU, DenseMeasurement(shipped.shape, shipped.tokens, 1.0, OWN.down))
    assert shipped.tiling != OWN.down
    assert dense_tiling.dense_tiling(shipped.tokens, shipped.shape) == OWN.down
    assert dense_tiling.dense_tiling(8, DENSE) == dense_tiling.rules(8, DENSE)


def test_without_a_gpu_there_is_none(here, monkeypatch):
    keep(here, GPU, Measurement(SHAPE, 64, 1.0, OWN))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert expert_tiling.expert_tiling(64, SHAPE) == expert_tiling.rules(64, SHAPE)


def test_another_gpus_table_is_not_used_even_in_this_ones_place(here, caplog):
    other = Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
    keep(here, other, Measurement(SHAPE, 64, 1.0, OWN))
    assert expert_tiling.expert_tiling(64, SHAPE) == expert_tiling.rules(64, SHAPE)
    assert "measured with other GPUs" in caplog.text
    assert read(here, other)["experts"]


def test_tilings_of_other_kernels_are_not_used_and_give_way_to_new_ones(here, monkeypatch, caplog):
    keep(here, GPU, Measurement(SHAPE, 64, 1.0, OWN))
    monkeypatch.setattr(tiling_tables, "_KERNELS", ("gemm.py",))
    assert read(here) == {"experts": [], "dense": []}
    assert "measured with other kernels" in caplog.text
    keep(here, GPU, Measurement(SHAPE, 8, 1.0, OWN))
    assert [one.tokens for one in read(here)["experts"]] == [8]


def test_the_kernels_that_are_meant_are_all_that_is_measured():
    """And each that one of them imports, but for those that say which backend or which tiling it is to be."""
    grimp = pytest.importorskip("grimp", reason="comes with import-linter")
    package = "moebius_kernels.triton."
    graph = grimp.build_graph("moebius_kernels", cache_dir=None)
    for choosing in ("admission", "dense_tiling", "expert_tiling"):
        graph.remove_module(package + choosing)
    measured = {package + "experts", package + "linear"}
    for module in tuple(measured):
        measured |= graph.find_upstream_modules(module)
    names = {name.removeprefix(package) + ".py" for name in measured if name.startswith(package)}
    assert set(tiling_tables._KERNELS) == names


def test_what_is_measured_again_is_replaced_and_all_else_stays(here):
    kept = [
        Measurement(SHAPE, 8, 5.0, OWN),
        Measurement(SHAPE, 64, 9.0, OWN),
        Measurement(replace(SHAPE, inner=704), 8, 7.0, OWN),
    ]
    dense = DenseMeasurement(DENSE, 8, 3.0, OWN.down)
    for entry in (*kept, dense):
        keep(here, GPU, entry)
    # The old one may have been measured under better conditions; it counts no longer.
    again = Measurement(SHAPE, 8, 6.0, ExpertTiling(OWN.gate_up, replace(OWN.down, swap=True)))
    keep(here, GPU, again)
    found = read(here)
    assert {(one.shape, one.tokens): one for one in found["experts"]} == {
        (one.shape, one.tokens): one for one in (again, *kept[1:])
    }
    assert found["dense"] == [dense]
    assert [path.name for path in here.parent.iterdir()] == [here.name]


def broken(change):
    def damage(path: Path) -> None:
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(path.read_text()[:-40]),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: (path.unlink(), path.mkdir()),
        broken(lambda table: table.pop("for")),
        broken(lambda table: table.pop("experts")),
        broken(lambda table: table.update(experts=[1])),
        broken(lambda table: table["experts"][0].pop("tokens")),
        broken(lambda table: table["experts"][0].update(tokens=0)),
        broken(lambda table: table["experts"][0].update(tokens="8")),
        broken(lambda table: table["experts"][0]["gate_up"].update(rows=-16)),
        broken(lambda table: table["experts"][0]["gate_up"].update(rows=16.0)),
        broken(lambda table: table["experts"][0]["down"].update(colour=3)),
        broken(lambda table: table["experts"][0]["shape"].update(hidden=None)),
    ],
)
def test_a_damaged_table_is_said_and_not_used(here, caplog, damage):
    keep(here, GPU, Measurement(SHAPE, 64, 1.0, OWN))
    damage(here)
    with caplog.at_level(logging.WARNING):
        assert expert_tiling.expert_tiling(64, SHAPE) == expert_tiling.rules(64, SHAPE)
    [record] = caplog.records
    assert str(here) in record.getMessage()
    assert "kernels tune" in record.getMessage()


def test_the_digest_changes_with_the_table(here, tmp_path):
    digests = [tilings_digest(tmp_path, GPU)]
    for tokens in (8, 64):
        keep(here, GPU, Measurement(SHAPE, tokens, 1.0, OWN))
        digests.append(tilings_digest(tmp_path, GPU))
    assert len(set(digests)) == 3
    assert tilings_digest(tmp_path, Device("cpu", "CPU")) == digests[0]
