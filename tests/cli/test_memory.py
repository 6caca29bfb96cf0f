"""The estimate of `moebius up`: bytes from headers, and a refusal with numbers."""

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from moebius_cli.errors import CliError
from moebius_cli.memory import GIB, MemoryNeed, least_weight_bytes
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from tests.worker.engine.schemes.stored_tensors import CHECKPOINTS


def test_floating_point_takes_float32(tiny_model: Path) -> None:
    numbers = sum(tensor.size for tensor in load_file(tiny_model / "model.safetensors").values())
    assert least_weight_bytes(open_checkpoint(str(tiny_model))) == 4 * numbers


@pytest.mark.parametrize("name", ["qwen3_moe-nvfp4-modelopt", "qwen3_moe_wide-W4A16-ct", "gpt_oss-mxfp4"])
def test_quantised_weights_take_what_they_are_stored_in(name: str) -> None:
    """The same as `moebius inspect` says, but for what few things there are in bf16 and fp32."""
    path = CHECKPOINTS / name
    stored = (path / "model.safetensors").stat().st_size
    assert 0.9 * stored < least_weight_bytes(open_checkpoint(str(path))) < 2 * stored


def test_a_gguf_file_takes_little_more_than_its_size() -> None:
    from moebius_worker.demo import dense_demo_model

    path = dense_demo_model()
    size = path.stat().st_size
    assert 0.95 * size < least_weight_bytes(open_checkpoint(str(path))) < 1.05 * size


def test_a_damaged_header_is_named(tiny_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model, tmp_path / "tiny")
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        least_weight_bytes(open_checkpoint(str(path)))


def test_refusal_says_how_many_workers_fit() -> None:
    need = MemoryNeed(weights=4 * 10**9, workers=4)
    need.check(need.total)
    with pytest.raises(CliError, match="--workers 3"):
        need.check(need.total - 1)
    with pytest.raises(CliError, match="smaller model"):
        need.check(GIB)
