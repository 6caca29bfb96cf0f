"""The one door through which kernels are launched: what is wrong is found here, and named.

CUDA reports a fault to whoever asks next. So an error that was there before a launch, or that came of work
launched earlier, is reported as such (`LatchedError`), never as the fault of the kernel at hand.
"""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

# "1": wait for each kernel, so that a fault shows at its own launch. Slow; for finding faults.
SYNCHRONISE = "MOEBIUS_SYNC_LAUNCHES"

_WARP = 32
_LINE = 2**31
# cudaDevAttrMaxSharedMemoryPerBlockOptin, of cudaDeviceAttr in driver_types.h.
_MOST_SHARED = 97
# What no launch can be told itself, but only what ran before it, as CUDA words it.
_ASYNCHRONOUS = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "invalid program counter",
    "invalid address space",
    "hardware stack error",
    "launch timed out",
    "uncorrectable ECC",
)


class Geometry(NamedTuple):
    """Blocks of a grid, threads of a block, bytes of dynamic shared memory of a block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0

    def __str__(self) -> str:
        shared = f", {self.shared} bytes of shared memory" if self.shared else ""
        return f"grid {self.grid}, block {self.block}{shared}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device takes. Grid and block: the CUDA programming guide, table of technical specifications, the
    same for all compute capabilities from 5.0 on."""

    shared: int
    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    block: tuple[int, int, int] = (1024, 1024, 64)
    threads: int = 1024


class LaunchError(RuntimeError):
    """A kernel could not be launched."""

    def __init__(
        self, kernel: str, backend: str, geometry: Geometry, shapes: Sequence[str], cause: str
    ) -> None:
        self.kernel, self.backend, self.geometry = kernel, backend, geometry
        self.shapes, self.cause = tuple(shapes), cause
        super().__init__(self._text())

    def _text(self) -> str:
        return f"the kernel {self._what()} could not be launched: {self.cause}"

    def _what(self) -> str:
        return f"{self.kernel} ({self.backend}; {self.geometry}; {', '.join(self.shapes) or 'no arguments'})"


class LatchedError(LaunchError):
    """An error of earlier work was found at a launch. The kernel that is named is not to blame."""

    def _text(self) -> str:
        return f"earlier work on the GPU failed, which showed before the kernel {self._what()}: {self.cause}"


class TritonKernel(Protocol):
    """What `triton.jit` makes of a function."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]: ...

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        """Compiles it for such arguments."""
        ...


class CudaKernel(Protocol):
    """A function of a loaded CUDA module."""

    @property
    def name(self) -> str: ...

    def __call__(self, geometry: Geometry, stream: int, /, *args: Any) -> None:
        """Raises RuntimeError with what the driver says."""
        ...


def misfit(geometry: Geometry, limits: Limits) -> str | None:
    """Why the device cannot launch this, None if it can."""
    (x, y, z), (width, height, depth), shared = geometry
    threads = width * height * depth
    # Most grids and blocks are a line.
    if 0 < x < _LINE and y == z == height == depth == 1 and 0 < threads <= 1024 and shared <= limits.shared:
        return None
    for name, sizes, most in (("grid", geometry.grid, limits.grid), ("block", geometry.block, limits.block)):
        for axis, size, limit in zip("xyz", sizes, most, strict=True):
            if not 1 <= size <= limit:
                return f"{name}.{axis} is {size}, allowed are 1 to {limit}"
    if threads > limits.threads:
        return f"a block has {threads} threads, allowed are {limits.threads}"
    if shared <= limits.shared:
        return None
    return f"a block takes {shared} bytes of shared memory, the device has {limits.shared}"


@dataclass(frozen=True, slots=True)
class Door:
    """`peek` gives CUDA's error state, 0 for none; `clear` gives it too and forgets it if it can be
    forgotten; `explain` puts it in words. `synchronise` waits for the device."""

    limits: Limits
    peek: Callable[[], int]
    clear: Callable[[], int]
    explain: Callable[[int], str]
    synchronise: Callable[[], None] | None = None

    def launch(
        self,
        kernel: Any,
        backend: str,
        geometry: Geometry,
        start: Callable[..., Any],
        args: Sequence[Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Calls `start(*args, **options)`, which launches. Raises LaunchError."""
        if reason := misfit(geometry, self.limits):
            raise LaunchError(_name(kernel), backend, geometry, _shapes(args), reason)
        if self.peek():
            cause = self.explain(self.clear())
            raise LatchedError(_name(kernel), backend, geometry, _shapes(args), cause)
        try:
            start(*args, **options)
            if self.synchronise is not None:
                self.synchronise()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise self._failure(cause)(_name(kernel), backend, geometry, _shapes(args), cause) from error
        if self.peek():
            cause = self.explain(self.clear())
            raise self._failure(cause)(_name(kernel), backend, geometry, _shapes(args), cause)

    def _failure(self, cause: str) -> type[LaunchError]:
        # If kernels are waited for, every fault is the kernel's own.
        earlier = self.synchronise is None and any(words in cause for words in _ASYNCHRONOUS)
        return LatchedError if earlier else LaunchError


def launch(kernel: TritonKernel, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
    """Launches a Triton kernel on the current stream: `kernel[grid](*args, **options)`.

    An empty grid is nothing to do. If the first argument has no numbers (device "meta"), the kernel is only
    compiled. Raises LaunchError, and LatchedError for what is not this kernel's fault.
    """
    if 0 in grid:
        return
    if isinstance(args[0], torch.Tensor) and args[0].is_meta:
        kernel.warmup(*args, grid=grid, **options)
        return
    x, y, z = (*grid, 1, 1)[:3]
    # Shared memory is Triton's own to count and to check, once it has compiled.
    geometry = Geometry((x, y, z), (_WARP * options.get("num_warps", 4), 1, 1))
    _door().launch(kernel, "triton", geometry, kernel[grid], args, options)


def launch_cuda(kernel: CudaKernel, geometry: Geometry, /, *args: Any) -> None:
    """The same for a kernel of a CUDA module; `args` are tensors and numbers of `ctypes`."""
    if 0 in geometry.grid:
        return
    stream = torch.cuda.current_stream().cuda_stream
    _door().launch(kernel, "cuda", geometry, partial(kernel, geometry, stream), args)


def latched_error(*, forget: bool = False) -> str | None:
    """CUDA's error state of this thread in words, None if there is none; `forget`: clears it if possible."""
    door = _door()
    code = door.clear() if forget else door.peek()
    return door.explain(code) if code else None


@cache
def _door() -> Door:
    if not torch.cuda.is_available():
        # Triton's interpreter: the limits are kept, so that what passes here passes there (H100's).
        return Door(Limits(shared=227 * 1024), lambda: 0, lambda: 0, str)
    torch.cuda.init()
    runtime = _runtime()
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    shared = ctypes.c_int()
    runtime.cudaDeviceGetAttribute(
        ctypes.byref(shared), _MOST_SHARED, ctypes.c_int(torch.cuda.current_device())
    )
    return Door(
        Limits(shared.value),
        runtime.cudaPeekAtLastError,
        runtime.cudaGetLastError,
        lambda code: f"CUDA error {code}: {runtime.cudaGetErrorString(code).decode()}",
        wait_for_device if os.environ.get(SYNCHRONISE) == "1" else None,
    )


def wait_for_device() -> None:
    """Unless it captures, and nothing runs yet. Raises RuntimeError for work that failed."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def _runtime() -> ctypes.PyDLL:
    """The CUDA runtime that PyTorch has loaded: the error state is that of a library and a thread. `PyDLL`
    keeps the interpreter's lock, which takes longer to pass on than these calls take."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libcudart" in path:
            return ctypes.PyDLL(f"/{path}")
    raise RuntimeError("PyTorch has loaded no CUDA runtime (libcudart)")


def _name(kernel: Any) -> str:
    """Of a CUDA kernel, a Triton kernel, or one of Triton's interpreter."""
    for owner, attribute in (
        (kernel, "name"),
        (kernel, "__name__"),
        (getattr(kernel, "fn", None), "__name__"),
    ):
        if isinstance(name := getattr(owner, attribute, None), str):
            return name
    return type(kernel).__name__


def _shapes(args: Sequence[Any]) -> list[str]:
    return [
        f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
        if isinstance(arg, torch.Tensor)
        else str(getattr(arg, "value", arg))
        for arg in args
    ]
