"""What the backends of this package say they cannot do."""

import pytest
import torch

from moebius_kernels.calls import named_arguments, shapes_of
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.registry import Device, Query, TokenRange, gather, refusal
from tests.kernels.paged_world import DEVICE
from tests.kernels.triton.device_world import DeviceWorld

HOPPER, AMPERE, TURING = (Device("cuda", "", architecture) for architecture in ((9, 0), (8, 0), (7, 5)))
OPERATIONS = (
    "rms_norm", "gated_rms_norm", "l2_norm", "gated", "apply_rotary", "topk_softmax", "softmax_topk",
    "sigmoid_topk", "write_kv", "paged_attention", "causal_conv1d", "gated_delta_rule",
    "draw_tokens",
)  # fmt: skip


def backend(operation):
    [found] = (one for one in gather(["moebius_kernels.triton"]).of(operation) if one.name == "triton")
    return found


def reason(operation, *args, device=HOPPER, **kwargs):
    arguments = shapes_of(operation, named_arguments(operation, args, kwargs))
    return refusal(backend(operation), Query(operation, arguments, TokenRange(1, 64), device))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_backend_that_graphs_can_capture(operation):
    assert backend(operation).capturable
    assert (9, 0) in backend(operation).architectures


def attention(heads, dim, format=KvFormat.MODEL):
    plan = DeviceWorld(1, 1, 8, num_pages=1).planner().plan([])
    pages = KvPages.allocate(format, 1, 8, 1, dim, dim, torch.bfloat16, DEVICE)
    return torch.zeros(0, heads, dim, device=DEVICE, dtype=torch.bfloat16), pages, plan


def test_attention():
    assert reason("paged_attention", *attention(32, 128)) is None
    assert reason("paged_attention", *attention(32, 576, KvFormat.FP8)) is None
    assert "e4m3" in reason("paged_attention", *attention(32, 128, KvFormat.FP8), device=AMPERE)
    assert reason("paged_attention", *attention(32, 128, KvFormat.INT8), device=AMPERE) is None
    assert "7.5" in reason("paged_attention", *attention(32, 128), device=TURING)
    assert "heads" in reason("paged_attention", *attention(512, 64))
    assert "heads" in reason("paged_attention", *attention(1, 640))


def test_what_is_too_large_for_a_program():
    assert reason("topk_softmax", torch.zeros(1, 512), 10) is None
    assert reason("topk_softmax", torch.zeros(1, 1025), 8) is not None
    assert reason("sigmoid_topk", torch.zeros(1, 256), 17) is not None
    assert reason("sigmoid_topk", torch.zeros(1, 64), 8, groups=16, top_groups=1) is not None
    assert reason("rms_norm", torch.zeros(1, 16384), None, 1e-6) is None
    assert reason("rms_norm", torch.zeros(1, 20000), None, 1e-6) is not None
    _, pages, plan = attention(1, 128)
    assert reason("write_kv", torch.zeros(1, 8, 128), torch.zeros(1, 8, 128), pages, plan) is None
    assert reason("write_kv", torch.zeros(1, 64, 512), torch.zeros(1, 64, 512), pages, plan) is not None
