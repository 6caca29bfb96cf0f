"""`moebius preflight` and `moebius kernels build`, as they are typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moebius_cli.main import app
from moebius_kernels.jit.nvcc import CudaSource
from tests.tiny import write_checkpoint

RUNNER = CliRunner()
# As a worker has them.
SETTINGS = (
    *("--max-running", "4", "--max-step-tokens", "64", "--kv-cache-dtype", "int8", "--page-size", "32"),
    *("--dtype", "float16", "--load-format", "dummy:nvfp4"),
)


def options() -> dict[str, Any]:
    """The same, as of `RunnerOptions`."""
    from moebius_kernels.kv_pages import KvFormat

    sizes = {"max_running": 4, "max_step_tokens": 64, "page_size": 32}
    return sizes | {"kv_format": KvFormat.INT8, "dtype": "float16", "dummy_weights": "nvfp4"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1))


def test_on_a_cpu_the_references_compute_everything(model: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    result = RUNNER.invoke(app, ["preflight", model, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "They compute everything" in result.output
    result = RUNNER.invoke(app, ["preflight", model, "--device", "cpu", "--json"])
    assert json.loads(result.stdout)["choices"] == []


def test_the_plan_is_a_table_with_reasons(model: str, monkeypatch, tmp_path: Path) -> None:
    from moebius_kernels import registry
    from tests.worker.preflight import bad

    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    offered = bad.registry("good", "wrong_numbers")
    monkeypatch.setattr(
        registry, "gather", lambda: registry.Registry(offered.backends, {"a.module": "broken"})
    )
    from moebius_worker.preflight import examine

    real = examine.preflight
    monkeypatch.setattr(
        examine,
        "preflight",
        lambda examination, *rest: real(
            _with_registry(examination, "tests.worker.preflight.bad:good_and_wrong"), *rest
        ),
    )
    arguments = ["preflight", model, "--device", "cpu", "--max-running", "2", "--max-step-tokens", "2"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("gated")]
    assert rows
    assert all("wrong_numbers: relative error 5.0e-02, allowed 1e-03" in row for row in rows)
    assert "not here a.module: broken" in result.output


def _with_registry(examination, name: str):
    from dataclasses import replace

    return replace(examination, registry=name)


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = RUNNER.invoke(app, ["preflight", "/no/such/model"])
    assert result.exit_code == 1
    assert "Error:" in result.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gated:god", "of gated there are here: good, slow"),
        ("gated:reference", "the reference stays: something has to compute"),
        ("gatde:good", "there is no such operation"),
        ("good", "there is no such operation"),
    ],
)
def test_a_name_that_excludes_nothing_is_refused(model: str, monkeypatch, name: str, reason: str) -> None:
    from moebius_kernels import registry
    from tests.worker.preflight import bad

    offered = bad.registry("good", "slow")
    monkeypatch.setattr(
        registry, "gather", lambda: registry.Registry(offered.backends, {"a.module": "broken"})
    )
    arguments = ["preflight", model, "--device", "cpu", "--exclude-backends", f"gated:slow,{name}"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 1
    assert f"--exclude-backends {name}: {reason} (not here: a.module: broken)" in result.output
    assert "gated:slow:" not in result.output


def test_kernels_are_compiled_ahead_for_each_architecture(monkeypatch, tmp_path: Path) -> None:
    from moebius_kernels import registry

    file = tmp_path / "scale.cu"
    file.write_text("int a;")
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo 13; exit; fi\nfor last; do :; done\necho > "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("MOEBIUS_NVCC", str(compiler))
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "cuda_sources", lambda: (CudaSource("scale", file),))
    result = RUNNER.invoke(app, ["kernels", "build", "--arch", "9.0", "--arch", "12.0"])
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "cache" / "cuda").iterdir())
    assert [name.rpartition("-")[0] for name in names] == ["scale-sm120", "scale-sm90"]


def test_a_model_s_kernels_are_compiled_for_the_worker_s_own_settings(model: str, monkeypatch) -> None:
    from moebius_kernels import registry
    from moebius_worker.engine.runner import RunnerOptions
    from moebius_worker.preflight import build

    built = []
    monkeypatch.setattr(registry, "cuda_sources", tuple)
    monkeypatch.setattr(build, "build_kernels", lambda checkpoint, *wanted: built.append(wanted[:2]))
    result = RUNNER.invoke(app, ["kernels", "build", "--arch", "9.0", "--model", model, *SETTINGS])
    assert result.exit_code == 0, result.output
    assert built == [(RunnerOptions(**options()), (9, 0))]


def test_a_plan_is_made_for_the_worker_s_own_settings(model: str, monkeypatch) -> None:
    """For all of those that it is looked for by."""
    from moebius_kernels.plan import Plan
    from moebius_worker.engine.runner import RunnerOptions
    from moebius_worker.preflight import examine

    wanted = []
    monkeypatch.setattr(
        examine,
        "find_plan",
        lambda checkpoint, one, *_, **__: wanted.append(one) or Plan((), {"device": "x"}),
    )
    result = RUNNER.invoke(app, ["preflight", model, *SETTINGS])
    assert result.exit_code == 0, result.output
    assert [one.options for one in wanted] == [RunnerOptions(**options())]


def test_without_a_model_there_may_be_nothing_to_compile(monkeypatch) -> None:
    from moebius_kernels import registry

    monkeypatch.setattr(registry, "cuda_sources", tuple)
    result = RUNNER.invoke(app, ["kernels", "build", "--arch", "9.0"])
    assert result.exit_code == 1
    assert "--model" in result.output


@pytest.mark.parametrize("arch", ["7.5", "99.0"])
def test_an_architecture_that_no_kernel_is_for_is_no_success(
    model: str, arch: str, monkeypatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    result = RUNNER.invoke(app, ["kernels", "build", "--arch", arch, "--model", model])
    assert result.exit_code == 1
    assert f"No kernel is made for {arch}. Choose among 8.0" in result.output
    assert "✓" not in result.output
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", [("preflight",), ("kernels", "build", "--arch", "9.0", "--model")])
def test_a_dtype_of_the_cache_that_there_is_not_is_refused(model: str, command: tuple[str, ...]) -> None:
    result = RUNNER.invoke(app, [*command, model, "--kv-cache-dtype", "int4"])
    assert result.exit_code == 2
    assert "fp8" in result.output


@pytest.mark.parametrize("arch", ["hopper", "9", "9.x"])
def test_what_is_no_architecture_is_refused(arch: str) -> None:
    result = RUNNER.invoke(app, ["kernels", "build", "--arch", arch])
    assert result.exit_code == 1
    assert "no compute capability" in result.output
