"""Which package may import which, as written (the contracts in pyproject.toml) and as it happens."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What must start fast and small, and run in an image without PyTorch.
LIGHT = (
    "moebius_gateway.main",
    "moebius_controller.main",
    "moebius_worker.main",
    "moebius_worker.front.server",
    "moebius_cli.main",
)


def test_import_contracts() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", LIGHT)
def test_imports_no_torch(module: str) -> None:
    """A child process, since this one has PyTorch from other tests."""
    heavy = "{'torch', 'transformers', 'moebius_kernels'}"
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
