"""`moebius kernels tune`, as it is typed."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moebius_cli.main import app
from moebius_kernels import tuning
from moebius_kernels.registry import Device
from moebius_kernels.tuning import Compiling, Dropped, Trying, Tuned, Tuner
from moebius_worker.preflight import tune as tuning_here
from tests.tiny import write_checkpoint

pytest.importorskip("triton")
RUNNER = CliRunner()
GPU = Device("cuda", "NVIDIA H200", (9, 0))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "mixtral", num_hidden_layers=1))


@pytest.fixture(autouse=True)
def wide(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str):
    return RUNNER.invoke(app, ["kernels", "tune", *arguments])


def listed(output: str) -> dict[tuple[str, str], str]:
    """Candidates, or why there are none, by product and token counts."""
    rows = [line.split("  ") for line in output.splitlines()[1:-1]]
    cells = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    return {(product, tokens): what for product, tokens, what in cells}


def test_the_dry_run_lists_each_shape_of_a_model_and_needs_no_gpu(model: str) -> None:
    result = run(model, "--dry-run", "--tokens", "8, 1,300")
    assert result.exit_code == 0, result.output
    found = listed(result.output)
    # 4 heads and 2 pairs of key and value heads of 16; 4 experts; a head of 384 words.
    assert [key for key in found if key[1] == "1, 8"] == [
        (f"dense bf16 {shape}", "1, 8") for shape in ("128x64", "64x64", "4x64", "384x64")
    ]
    assert found["dense bf16 4x64", "300"] == "PyTorch's product is faster"
    assert int(found["experts bf16 4/2/64/96", "1, 8, 300"]) > 20
    total = sum(int(what) for what in found.values() if what.isdigit())
    assert result.output.splitlines()[-1] == f"{total} candidates in all"


def test_a_config_is_enough_for_random_weights(model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(str(tmp_path), "--dry-run", "--load-format", "dummy:nvfp4", "--experts-only")
    assert result.exit_code == 0, result.output
    # As kernels read them.
    [(product, _)] = listed(result.output)
    assert product == "experts nvfp4_words 4/2/64/96"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "1,zwei"], "--tokens '1,zwei': give whole numbers above 0"),
        (["--tokens", "0"], "--tokens '0'"),
        (["--load-format", "gguf"], "--load-format 'gguf': choose auto or dummy:FORM"),
        (["--load-format", "dummy:q9"], "no dummy weights of the form 'q9'"),
    ],
)
def test_what_cannot_be_is_one_line(model: str, arguments: list[str], said: str) -> None:
    result = run(model, "--dry-run", *arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert len(result.output.splitlines()) == 1


def test_without_a_gpu_it_says_so_and_what_to_do(model: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(model)
    assert result.exit_code == 1
    [line] = result.output.splitlines()
    assert "finds no NVIDIA GPU" in line
    assert "--dry-run" in line


def on_a_gpu(monkeypatch, tune) -> None:
    points = tuning.find_tuner().points
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning_here, "device_here", lambda kind: GPU)
    monkeypatch.setattr(tuning_here, "use_directory", lambda path: None)
    for module in (tuning, tuning_here):
        monkeypatch.setattr(module, "find_tuner", lambda: Tuner(points, tune))


def test_each_tiling_that_is_found_is_a_line_and_the_table_is_named(
    model: str, monkeypatch, tmp_path: Path
) -> None:
    asked = []

    def tune(points, device, path, report) -> None:
        asked.append((len(points), device, path))
        report(Compiling(0, 7))
        [first, *_] = points
        report(Trying(first, 1, None))
        report(Dropped(first, "8x64x64 w4 s4", "wrong numbers, error 3.0e-01"))
        report(Trying(first, 2, 12.0))
        report(Tuned(first, "8x32x64 w2 s4", 10.25, 12.0))
        report(Tuned(first, "8x32x64 w2 s4", 12.0, 12.0))
        report(Tuned(first, "", None, None))

    on_a_gpu(monkeypatch, tune)
    result = run(model, "--experts-only", "--tokens", "1,8")
    assert result.exit_code == 0, result.output
    path = tmp_path / "cache" / "tilings" / "nvidia-h200-sm90.json"
    assert asked == [(2, GPU, path)]
    lines = result.output.splitlines()
    head = "experts bf16 4/2/64/96, tokens 1:"
    assert lines[:4] == [
        f"dropped {head} 8x64x64 w4 s4: wrong numbers, error 3.0e-01",
        f"{head} 10.2 µs (before 12.0) 8x32x64 w2 s4",
        f"{head} 12.0 µs (before 12.0) 8x32x64 w2 s4",
        f"nothing works {head}",
    ]
    assert "2 tilings measured, 1 of them better than before" in lines[4]
    assert lines[5] == f"Kept in {path}"


def test_a_cache_that_cannot_be_written_is_one_line(model: str, monkeypatch) -> None:
    def tune(points, device, path, report) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    on_a_gpu(monkeypatch, tune)
    result = run(model)
    assert result.exit_code == 1
    assert "The tilings cannot be kept" in result.output
    assert "Traceback" not in result.output
