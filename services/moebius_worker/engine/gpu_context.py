"""Wakes the GPU while Python imports PyTorch: the driver takes as long for it, and needs no Python."""

import contextlib
import ctypes
import os
import threading

# cuda.h: the driver's own interface, which PyTorch uses beneath the runtime's.
_DRIVER = "libcuda.so.1"


def wake_gpu(device: str) -> None:
    """Begins to make the context that PyTorch will use on this device (as of the settings), where there is
    a driver. Whatever goes wrong, PyTorch will meet again and explain.

    The process must not fork from now on: children could not use the GPU.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    # As PyTorch sets it: kernels are loaded when they are launched first. The driver reads it now.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    with contextlib.suppress(OSError, ValueError):
        driver = ctypes.CDLL(_DRIVER)
        threading.Thread(target=_make_context, args=(driver, int(number or 0)), daemon=True).start()


def _make_context(driver: ctypes.CDLL, number: int) -> None:
    """The primary context, which stays: the runtime finds it and takes it. Each call says 0 for success."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, *arguments in (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), number),
        (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
    ):
        if call(*arguments) != 0:
            return
