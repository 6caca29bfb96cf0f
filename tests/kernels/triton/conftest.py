"""Where there is no GPU, Triton's interpreter runs the kernels: Triton is told before it is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.triton.interpreter import mend

    mend()


@pytest.fixture
def poisoned():
    """Memory that nobody has written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
