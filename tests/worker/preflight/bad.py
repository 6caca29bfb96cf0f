"""A model of three operations, and backends that each fail at one gate, for the sacrificial process too."""

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.formats.dense import dense
from moebius_kernels.operations import REFERENCE, Operations
from moebius_kernels.registry import Backend, Device, Query, Registry, references
from moebius_kernels.tensor_tree import tensors_of
from moebius_worker.preflight.machine import Host
from moebius_worker.preflight.subject import ProbeStep

SIZE = 16
RAN_OUT = "CUDA out of memory. Tried to allocate 5.00 GiB."


class SimulatedCuda(Host):
    """A CPU with what CUDA has besides: captures, in which some things fail, and an error state."""

    captures = True

    def __init__(self) -> None:
        self.capturing = False
        self.error: str | None = None
        # Of the current step, which no candidate should know.
        self.kind = ""

    def latched_error(self) -> str | None:
        error, self.error = self.error, None
        return error

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.capturing = True
        try:
            result = function()
        finally:
            self.capturing = False

        def replay() -> None:
            for kept, new in zip(tensors_of(result), tensors_of(function()), strict=True):
                kept.copy_(new)

        return replay, result

    def healthy(self) -> bool:
        return self.error is None


MACHINE = SimulatedCuda()


class Tiny:
    """gate_up, activation, norm."""

    machine = MACHINE
    device = Device("cpu", "a simulated GPU")

    def __init__(self, size: int = SIZE) -> None:
        torch.manual_seed(0)
        self.size = size
        self.weight = (dense(torch.randn(2 * size, size)),)
        self.norm = torch.rand(size) + 0.5
        self.ops = REFERENCE

    def bind(self, operations: Operations) -> None:
        self.ops = operations

    def run(self, step: ProbeStep) -> None:
        self.machine.kind = step.kind
        x = torch.randn(step.tokens, self.size, generator=torch.Generator().manual_seed(step.tokens))
        hidden = self.ops.gated(self.ops.linear(x, self.weight), SILU)
        self.ops.rms_norm(hidden, self.norm, 1e-6)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    return REFERENCE.gated(gate_up, activation)


def good(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def raises_at_two(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if len(gate_up) >= 2:
        raise ValueError("no valid tile for M = 2")
    return good(gate_up, activation)


def wrong_numbers(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    return good(gate_up, activation) * 1.05


def wrong_row(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    result = good(gate_up, activation)
    if len(gate_up) == 8:
        result[3] *= 1.1
    return result


def makes_nan(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    result = good(gate_up, activation)
    result[-1, -1] = math.nan
    return result


def forgets_a_row(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    result = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    result[: len(result) - 1] = good(gate_up, activation)[:-1]
    return result


def changes_its_input(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    result = good(gate_up, activation)
    gate_up.zero_()
    return result


def refuses_capture(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if MACHINE.capturing:
        raise RuntimeError("operation not permitted when stream is capturing")
    return good(gate_up, activation)


class ReadsAtCapture:
    """Bakes what it saw at its capture into every replay."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None

    def __call__(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if MACHINE.capturing:
            self.seen = good(gate_up, activation)
            return self.seen
        seen, self.seen = self.seen, None
        return good(gate_up, activation) if seen is None else seen.clone()


def runs_out(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    raise torch.OutOfMemoryError(RAN_OUT)


def has_no_room_for_its_own() -> Callable[..., Any]:
    raise torch.OutOfMemoryError(RAN_OUT)


def runs_out_in_captures(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if MACHINE.capturing:
        # What PyTorch says of the end of the capture hides it.
        end = RuntimeError("operation failed due to a previous error during capture")
        raise end from torch.OutOfMemoryError(RAN_OUT)
    return good(gate_up, activation)


def leaves_an_error(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    MACHINE.error = "invalid argument"
    return good(gate_up, activation)


def exits_in_prefills(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Whose sites were judged in decodes."""
    if MACHINE.kind == "prefill":
        os._exit(0)
    return good(gate_up, activation)


def raises_in_prefills(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if MACHINE.kind == "prefill":
        raise ValueError("no such stride")
    return good(gate_up, activation)


def hangs(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    time.sleep(1000)
    return good(gate_up, activation)


def exits(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    os._exit(0)


def is_killed_at_two(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As the kernel does that is short of memory."""
    if len(gate_up) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return good(gate_up, activation)


def closes_and_stays(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Nothing more is heard of its process, which ends no sooner than it must."""
    os.closerange(3, 1024)
    time.sleep(1000)
    return good(gate_up, activation)


def illegal_access(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    if len(gate_up) >= 4:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(1000)
    return good(gate_up, activation)


def slow(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    time.sleep(0.002)
    return good(gate_up, activation)


def no_more_than_four(query: Query) -> str | None:
    return "has no tile for more than 4 tokens" if query.tokens.last > 4 else None


def _candidate(function: Callable[..., Any], **changes: Any) -> Backend:
    name = getattr(function, "__name__", type(function).__name__)
    # On a busy machine any call may take seconds; only `hangs` is to be given up soon.
    return Backend("gated", name, function, **{"devices": ("cpu",), "build_seconds": 10.0, **changes})


CANDIDATES = {
    one.name: one
    for one in (
        _candidate(good),
        _candidate(slow),
        _candidate(raises_at_two),
        _candidate(wrong_numbers),
        _candidate(wrong_row),
        _candidate(makes_nan),
        _candidate(forgets_a_row),
        _candidate(changes_its_input),
        _candidate(refuses_capture),
        _candidate(ReadsAtCapture()),
        _candidate(runs_out),
        _candidate(runs_out_in_captures),
        Backend("gated", "without_room", good, devices=("cpu",), own=has_no_room_for_its_own),
        _candidate(leaves_an_error),
        _candidate(hangs, build_seconds=0.0),
        _candidate(exits),
        _candidate(is_killed_at_two),
        _candidate(closes_and_stays),
        _candidate(illegal_access),
        _candidate(exits_in_prefills),
        _candidate(raises_in_prefills),
        Backend("gated", "wrong_architecture", good, architectures=frozenset({(9, 0)})),
        Backend("gated", "small_tiles", good, devices=("cpu",), admits=no_more_than_four),
        Backend("gated", "as_declared", wrong_numbers, devices=("cpu",), reference=wrong_numbers),
        Backend("gated", "builds_long", good, devices=("cpu",), build_seconds=300.0),
        Backend("gated", "not_as_declared", good, devices=("cpu",), reference=wrong_numbers),
    )
}


def registry(*names: str) -> Registry:
    return Registry((*references(), *(CANDIDATES[name] for name in names)), {})


# What a sacrificial process is told to examine.
_ALONE = {"exits_in_prefills", "raises_in_prefills", "is_killed_at_two", "closes_and_stays"}
everything = partial(registry, *(name for name in CANDIDATES if name not in _ALONE))
good_until_later = partial(registry, "exits_in_prefills")
only_good = partial(registry, "good")
killed = partial(registry, "is_killed_at_two")
never_ends = partial(registry, "closes_and_stays")
good_and_wrong = partial(registry, "good", "wrong_numbers")


class Remembers(Tiny):
    """Leaves a file when it first computes, the compiling process's when it is asked for its sizes."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def run(self, step: ProbeStep) -> None:
        if not (self.folder / "run").exists():
            # What was written when compiling was over.
            (self.folder / "run").write_text(" ".join(sorted(one.name for one in self.folder.iterdir())))
        super().run(step)


class Placed(Tiny):
    """Leaves a file that says where its kernels would be."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        (Path(folder) / "place").write_text(os.environ["TRITON_CACHE_DIR"])


def slow_sizes(folder: str) -> Tiny:
    time.sleep(1.0)
    (Path(folder) / "sizes").touch()
    raise ValueError("and now something is wrong with them")


def no_sizes(**options: Any) -> Tiny:
    os._exit(4)


class SizesThatRaise(Tiny):
    """Sizes with which nothing can be computed."""

    device = Device("cuda", "a GPU that is not here", (9, 0))

    def run(self, step: ProbeStep) -> None:
        raise ValueError("not on this device")


class RunsOut(Tiny):
    """A model that has no room beside what its device holds already."""

    def run(self, step: ProbeStep) -> None:
        raise torch.OutOfMemoryError(RAN_OUT)


class Fails(Tiny):
    """A model that cannot be computed, whatever the candidates do."""

    def run(self, step: ProbeStep) -> None:
        os._exit(3)
