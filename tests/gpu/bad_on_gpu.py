"""The model of `tests.worker.preflight.bad` on a GPU, and backends that do what only a GPU lets them do."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from moebius_kernels.activations import Activation
from moebius_kernels.formats.dense import dense
from moebius_kernels.launch import _runtime, launch
from moebius_kernels.registry import Backend, Registry, references
from moebius_worker.preflight.machine import Cuda, device_here
from tests.worker.preflight import bad

ANY = frozenset({(major, minor) for major in range(7, 13) for minor in range(10)})


@triton.jit
def _silu_times(gate_up, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(output + row * width + column, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _write_far_away(output):
    tl.store(output + (1 << 44), 1.0)


class Tiny(bad.Tiny):
    def __init__(self, size: int = 64) -> None:
        super().__init__(size)
        self.machine = Cuda()
        self.device = device_here("cuda")
        [matrix] = self.weight
        self.weight = (dense(matrix.parts["data"].cuda().bfloat16()),)
        self.norm = self.norm.cuda()

    def run(self, step: Any) -> None:
        generator = torch.Generator().manual_seed(step.tokens)
        x = torch.randn(step.tokens, self.size, generator=generator).cuda().bfloat16()
        hidden = self.ops.gated(self.ops.linear(x, self.weight), bad.SILU)
        self.ops.rms_norm(hidden, self.norm, 1e-6)


def fast(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    width = gate_up.shape[1] // 2
    output = gate_up.new_empty(len(gate_up), width)
    block = triton.next_power_of_2(width)
    launch(_silu_times, (len(gate_up),), gate_up, output, width, BLOCK=block, num_warps=1)
    return output


def illegal_access(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    output = fast(gate_up, activation)
    if len(gate_up) >= 3:
        launch(_write_far_away, (1,), output)
    return output


def leaves_an_error(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    output = fast(gate_up, activation)
    runtime = _runtime()
    runtime.cudaMemcpy(ctypes.c_void_p(8), ctypes.c_void_p(16), ctypes.c_size_t(4), 99)
    return output


def waits_for_the_device(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    output = fast(gate_up, activation)
    output[0, 0].item()
    return output


def forks_and_does_not_join(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    output = fast(gate_up, activation)
    with torch.cuda.stream(side):
        fast(gate_up, activation)
    return output


def hangs(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    output = fast(gate_up, activation)
    torch.cuda._sleep(1 << 42)
    return output


def compiles_for_ever(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    time.sleep(100)
    return fast(gate_up, activation)


def forgets_a_row(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    output[:-1] = fast(gate_up, activation)[:-1]
    return output


def _candidate(function: Callable[..., Any], **changes: Any) -> Backend:
    return Backend("gated", function.__name__, function, **{"architectures": ANY, **changes})


def everything() -> Registry:
    candidates = (
        fast,
        leaves_an_error,
        waits_for_the_device,
        forks_and_does_not_join,
        forgets_a_row,
        illegal_access,
        hangs,
        compiles_for_ever,
    )
    elsewhere = Backend("gated", "elsewhere", fast, architectures=frozenset({(7, 9)}))
    return Registry((*references(), *map(_candidate, candidates), elsewhere), {})
