"""The estimate of `moebius up`: parameters from headers, and a refusal with numbers."""

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from moebius_cli.errors import CliError
from moebius_cli.memory import GIB, MemoryNeed, count_parameters
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint


def test_parameters_of_safetensors(tiny_model: Path) -> None:
    expected = sum(tensor.size for tensor in load_file(tiny_model / "model.safetensors").values())
    assert count_parameters(open_checkpoint(str(tiny_model))) == expected


def test_parameters_of_gguf() -> None:
    from moebius_worker.demo import dense_demo_model

    # SmolLM2-135M, its embedding tied to its head.
    assert count_parameters(open_checkpoint(str(dense_demo_model()))) == 134_515_008


def test_a_damaged_header_is_named(tiny_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "tiny")
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        count_parameters(open_checkpoint(str(path)))


def test_refusal_says_how_many_workers_fit() -> None:
    need = MemoryNeed(parameters=10**9, bytes_per_parameter=4, workers=4)
    need.check(need.total)
    with pytest.raises(CliError, match="--workers 3"):
        need.check(need.total - 1)
    with pytest.raises(CliError, match="smaller model"):
        need.check(GIB)
