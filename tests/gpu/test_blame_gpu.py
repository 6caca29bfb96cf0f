"""A kernel that does what it must not: who is blamed while operations are waited for, and while none is."""

import os
import subprocess
import sys
import tempfile

import pytest
import torch

from moebius_worker.flight_recorder import read_flights, suspect

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

# The device is lost to the process that does it.
SCRIPT = """
import sys
import torch
from moebius_kernels.activations import SILU
from moebius_kernels.calls import key_of, named_arguments, shapes_of
from moebius_kernels.dispatch import bind
from moebius_kernels.plan import Choice, Plan
from moebius_kernels.registry import TokenRange
from moebius_worker.engine.probation import Probation
from moebius_worker.engine.serving import DEVICE_ERRORS
from moebius_worker.flight_recorder import FlightRecorder
from tests.gpu.bad_on_gpu import everything

x = torch.randn(4, 128, device="cuda", dtype=torch.bfloat16)

def choice(backend, rows):
    key = key_of(shapes_of("gated", named_arguments("gated", (x, SILU), {})))
    return Choice("gated", key, TokenRange(*rows), backend, True, ())

plan = Plan((choice("fast", (1, 3)), choice("illegal_access", (4, 4))))
watch = Probation(60) if sys.argv[2] == "watched" else None
ops = bind(plan, everything(), FlightRecorder(int(sys.argv[1])), watch=watch)
ops.gated(x[:2], SILU)
torch.cuda.synchronize()
try:
    if sys.argv[3] == "ours":
        ops.gated(x, SILU)
    else:
        # What PyTorch computes between operations.
        x[torch.tensor([1 << 40], device="cuda")]
    for _ in range(20):
        ops.gated(x[:2], SILU)
    torch.cuda.synchronize()
except DEVICE_ERRORS as error:
    print("found:", error)
    sys.exit(3)
"""


def flights_of(watched: str, guilty: str) -> list[str]:
    """What was noted when the fault was found, the latest first."""
    with tempfile.TemporaryFile() as file:
        command = [sys.executable, "-c", SCRIPT, str(file.fileno()), watched, guilty]
        done = subprocess.run(
            command, pass_fds=(file.fileno(),), capture_output=True, text=True, env=os.environ, check=False
        )
        assert done.returncode == 3, done.stderr
        flights = read_flights(file.fileno())
    blamed = suspect(flights)
    print(f"{watched}, {guilty}: {blamed and blamed.name}; {done.stdout.strip()[:200]}")
    return [flight.name for flight in flights]


def test_on_probation_the_guilty_is_noted_last() -> None:
    noted = flights_of("watched", "ours")
    assert noted[:3] == ["gated:illegal_access", "none:reference", "gated:fast"]


def test_on_probation_nobody_is_blamed_for_pytorchs_own() -> None:
    assert flights_of("watched", "torch's")[0] == "none:reference"


def test_otherwise_innocents_are_noted_after_it() -> None:
    """Why nobody is excluded for that: if this changes, probations are not needed."""
    noted = flights_of("unwatched", "ours")
    assert "gated:illegal_access" in noted[1:]
