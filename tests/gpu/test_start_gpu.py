"""What makes a start on a GPU short."""

import os
import statistics
import subprocess
import sys
import time

import pytest
import torch

from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

# The driver's word on the context of device 0 while PyTorch is not there yet, and PyTorch in that context.
WOKEN = """
import ctypes, sys, threading
from moebius_worker.engine.gpu_context import wake_gpu
wake_gpu("cuda")
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
assert "torch" not in sys.modules
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
import torch
print(active.value, float(torch.ones(3, device="cuda").sum()), torch.cuda.current_device())
"""


def test_the_driver_has_made_the_context_before_pytorch_is_imported() -> None:
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WOKEN], env=paths, check=True, timeout=100, capture_output=True, text=True
    )
    assert done.stdout == "1 3.0 0\n"


@pytest.mark.timed
def test_attention_of_the_reference_builds_nothing_for_a_new_shape() -> None:
    """cuDNN would, for some 0.4 s each; what is loaded once has been loaded by the first."""
    device = torch.device("cuda")
    pages = KvPages.allocate(KvFormat.MODEL, 400, 16, 4, 128, 128, torch.bfloat16, device)
    seconds: list[float] = []
    for number in range(8):
        keys = 33 + 71 * number
        spans = [Span(keys, 1, [*range(40)]), Span(keys + 200, 1, [*range(60)]), Span(keys, 9, [*range(40)])]
        plan = plan_attention(spans, page_size=16, window=None, dtype=torch.bfloat16, device=device)
        q = torch.randn(11, 32, 128, dtype=torch.bfloat16, device=device)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        assert paged_attention(q, pages, plan).shape == q.shape
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    assert statistics.median(seconds) < 0.1, seconds
