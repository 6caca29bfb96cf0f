"""Binaries on the device: modules loaded by the driver, and their functions, which `launch_cuda` launches."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moebius_kernels.launch import Geometry

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, of CUfunction_attribute in cuda.h.
_DYNAMIC_SHARED = 8
# What a function may use of shared memory without being told so, on all architectures.
_UNASKED_SHARED = 48 * 1024


class CudaModule:
    """A binary on the current device, for as long as this lives. Raises RuntimeError if it is not for it."""

    def __init__(self, binary: Path) -> None:
        # The runtime's own context, which PyTorch's tensors are in.
        torch.cuda.current_stream().synchronize()
        self._handle = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), binary.read_bytes()))

    def function(self, name: str) -> "CudaFunction":
        """Raises RuntimeError if there is none of this name."""
        handle = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()))
        return CudaFunction(name, handle, self)


class CudaFunction:
    def __init__(self, name: str, handle: ctypes.c_void_p, module: CudaModule) -> None:
        self.name = name
        self._handle = handle
        # Unloaded, its functions would be gone.
        self._module = module
        self._shared = _UNASKED_SHARED

    def __call__(self, geometry: Geometry, stream: int, /, *args: Any) -> None:
        """Launches without any check: use `launch_cuda`. Raises RuntimeError with what the driver says."""
        if geometry.shared > self._shared:
            _check(_driver().cuFuncSetAttribute(self._handle, _DYNAMIC_SHARED, geometry.shared))
            self._shared = geometry.shared
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        _check(
            _driver().cuLaunchKernel(
                self._handle,
                *geometry.grid,
                *geometry.block,
                geometry.shared,
                ctypes.c_void_p(stream),
                pointers,
                None,
            )
        )


def _value(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, ctypes._SimpleCData):
        return arg
    raise TypeError(f"{arg!r} is of no type that a kernel has: give a tensor, or a number of ctypes")


def _check(code: int) -> None:
    if code:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        _driver().cuGetErrorString(code, ctypes.byref(text))
        words: Sequence[bytes] = [one.value or b"?" for one in (name, text)]
        raise RuntimeError(" ".join(["CUDA driver:", *(word.decode() for word in words)]))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
