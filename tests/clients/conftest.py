"""Stacks for the clients. They run in the product's environment, the tests in that of the clients.

`make test-clients` makes both; the product's Python is MOEBIUS_PYTHON.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

# What the mark `timed` means.
pytest_plugins = ["tests.timed"]

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MOEBIUS_PYTHON", str(ROOT / ".venv" / "bin" / "python"))


@dataclass(frozen=True)
class Api:
    url: str
    model: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def _stack(kind: str) -> Iterator[Api]:
    process = subprocess.Popen(
        [PYTHON, "-m", "tests.clients.stacks", kind],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, f"the stack did not start: {process.wait()}"
        yield Api(url, httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"])
    finally:
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="session")
def scripted() -> Iterator[Api]:
    """Its model repeats what it is told, thinks when it is told to, and calls tools: see scripted_worker."""
    with _stack("scripted") as api:
        yield api


@pytest.fixture(scope="session")
def sim() -> Iterator[Api]:
    """Its model says random words, and keeps to grammars."""
    with _stack("sim") as api:
        yield api


@pytest.fixture(scope="session")
def real() -> Iterator[Api]:
    """Its model is a real MoE, tiny and random: it keeps to grammars."""
    with _stack("real") as api:
        yield api
