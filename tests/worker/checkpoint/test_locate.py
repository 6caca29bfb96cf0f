"""Finding a checkpoint: paths, and ids on a Hub that is there, is not there, or does not know them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.locate import locate
from tests.worker.checkpoint.hub import hub

FILES = {
    name: f"content of {name}".encode() * 100
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
}
UNWANTED = {
    name: f"unwanted {name}".encode()
    for name in (
        "README.md",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "consolidated.safetensors",
        "onnx/model.onnx",
        "model-Q4_K_M.gguf",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
    )
}


def locate_in_process(endpoint: str, cache: Path, location: str, download: bool = True) -> dict:
    """Runs `locate` where the Hub's settings, which are read at import, are these."""
    code = (
        "import json, sys\n"
        "from moebius_worker.checkpoint.errors import CheckpointError\n"
        "from moebius_worker.checkpoint.locate import locate\n"
        "calls = []\n"
        "try:\n"
        "    found = locate(\n"
        "        sys.argv[1], download=sys.argv[2] == 'True', progress=lambda *call: calls.append(call)\n"
        "    )\n"
        "    answer = {'path': str(found.path), 'name': found.name, 'progress': calls}\n"
        "except CheckpointError as error:\n"
        "    answer = {'error': str(error)}\n"
        "print(json.dumps(answer))\n"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run(
        [sys.executable, "-c", code, location, str(download)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_an_id_is_downloaded_once_with_the_files_that_are_needed(tmp_path: Path) -> None:
    with hub("owner/some-moe", FILES | UNWANTED) as (endpoint, downloaded):
        found = locate_in_process(endpoint, tmp_path, "owner/some-moe")
        assert sorted(downloaded) == sorted(FILES)
        again = locate_in_process(endpoint, tmp_path, "owner/some-moe")
        assert len(downloaded) == len(FILES)
    assert found["name"] == "owner/some-moe"
    path = Path(found["path"])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    total = sum(len(data) for data in FILES.values())
    assert found["progress"][-1] == ["downloading owner/some-moe", total, total]
    assert again["path"] == found["path"]
    # The Hub is gone now: the cache has it all.
    assert locate_in_process(endpoint, tmp_path, "owner/some-moe")["path"] == found["path"]
    assert locate_in_process(endpoint, tmp_path, "owner/some-moe", download=False)["path"] == found["path"]


def test_a_gguf_file_of_a_repository_comes_alone_but_with_its_shards(tmp_path: Path) -> None:
    with hub("owner/some-gguf", FILES | UNWANTED) as (endpoint, downloaded):
        found = locate_in_process(endpoint, tmp_path, "owner/some-gguf/model-Q4_K_M.gguf")
        assert downloaded == ["model-Q4_K_M.gguf"]
        assert Path(found["path"]).read_bytes() == UNWANTED["model-Q4_K_M.gguf"]
        assert found["name"] == "model-Q4_K_M"
        any_of_them = locate_in_process(endpoint, tmp_path, "owner/some-gguf/big-00002-of-00002.gguf")
        assert any_of_them["name"] == "big"
        assert sorted(downloaded[1:]) == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
        missing = locate_in_process(endpoint, tmp_path, "owner/some-gguf/other.gguf")
    assert "has no file other.gguf" in missing["error"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with hub("owner/some-moe", FILES) as (endpoint, _):
        unknown = locate_in_process(endpoint, tmp_path, "owner/unknown")
    offline = locate_in_process(endpoint, tmp_path, "owner/some-moe")
    forbidden = locate_in_process(endpoint, tmp_path, "owner/some-moe", download=False)
    assert "has no model owner/unknown" in unknown["error"]
    assert "HF_TOKEN" in unknown["error"]
    assert "Cannot download owner/some-moe: the Hugging Face Hub cannot be reached" in offline["error"]
    assert "give its directory" in offline["error"]
    assert "downloading is off" in forbidden["error"]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "file.gguf").write_bytes(b"")
    (tmp_path / "file.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(tmp_path / "model")).name == "model"
    assert locate(".").name == "model"
    assert locate("~/file.gguf").path == tmp_path / "file.gguf"
    assert locate("../file.gguf").name == "file"
    (tmp_path / "file-00002-of-00003.gguf").write_bytes(b"")
    assert locate("../file-00002-of-00003.gguf").name == "file"
    with pytest.raises(CheckpointError, match=r"not a \.gguf file"):
        locate("../file.bin")
    for nothing in ("/nowhere/at/all", "nowhere", "models/missing.gguf", "../missing.gguf"):
        with pytest.raises(CheckpointError, match=r"There is no .*Hugging Face id"):
            locate(nothing)
