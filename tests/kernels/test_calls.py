"""A call's site, which is found in no time, tells apart what its key tells apart."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from moebius_kernels.activations import GELU_TANH, SILU, ClampedSwiglu
from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.calls import CALLS, key_of, named_arguments, shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.rotary import Angles
from moebius_kernels.router import Route
from moebius_kernels.sampling import Draws
from moebius_kernels.state_plan import plan_states

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def rows(tokens: int, *sizes: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.zeros(tokens, *sizes, dtype=dtype)


def matrix(*shape: int, dtype: torch.dtype = FP32) -> StoredMatrix:
    return dense(torch.zeros(*shape, dtype=dtype))


def mxfp4(*shape: int) -> StoredMatrix:
    return StoredMatrix.empty(Mxfp4(), shape, CPU)


def pages(
    format: KvFormat = KvFormat.MODEL, heads: int = 1, key_dim: int = 8, shared: bool = False
) -> KvPages:
    return KvPages.allocate(format, 4, 4, heads, key_dim, 8, FP32, CPU, values_in_keys=shared)


def plan(tokens: int, window: int | None = None) -> Any:
    spans = [Span(0, tokens, (0, 1, 2))]
    return plan_attention(spans, page_size=4, window=window, dtype=FP32, device=CPU)


def states(tokens: int) -> Any:
    return plan_states([Span(0, tokens, ())], [0], CPU)


def experts(**changed: Any) -> ExpertWeights:
    given: dict[str, Any] = {"gate_up": [matrix(4, 64, 32)], "down": matrix(4, 32, 32)}
    return ExpertWeights(**(given | changed))


def angles(tokens: int, width: int = 8, interleaved: bool = False) -> Angles:
    return Angles(rows(tokens, 1, width), rows(tokens, 1, width), interleaved)


def draws(tokens: int, candidates: int = 0) -> Draws:
    numbers = torch.zeros(tokens)
    return Draws(numbers.long(), numbers.long(), numbers, numbers.int(), numbers, numbers, candidates)


def call(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def routed(
    t: int, weights: ExpertWeights | None = None, k: int = 2, dtype: torch.dtype = FP32, **more: Any
) -> Arguments:
    route = Route(rows(t, k), rows(t, k, dtype=torch.int64))
    return call(rows(t, 32, dtype=dtype), route, weights or experts(), **more)


def rotated(
    t: int, kv: KvPages | None = None, dtype: torch.dtype = FP32, turning: Angles | None = None, **more: Any
) -> Arguments:
    q, k = rows(t, 2, 8, dtype=dtype), rows(t, 1, 8, dtype=dtype)
    return call(q, k, k, turning or angles(t), kv or pages(), plan(t), **more)


def delta(t: int, heads: int = 2, dim: int = 8, dtype: torch.dtype = FP32) -> Arguments:
    q, v, g = rows(t, 1, dim, dtype=dtype), rows(t, heads, 8, dtype=dtype), rows(t, heads)
    return call(q, q, v, g, g.to(dtype), torch.zeros(1, heads, dim, 8), states(t))


def convolved(
    t: int, channels: int = 4, taps: int = 3, bias: bool = False, *rest: Any, **more: Any
) -> Arguments:
    past = (taps - 1) * more.get("dilation", 1)
    offset = torch.zeros(channels) if bias else None
    return call(
        rows(t, channels),
        torch.zeros(channels, taps),
        offset,
        torch.zeros(1, channels, past),
        states(t),
        *rest,
        **more,
    )


# Of each operation calls that are no two of one site, with so many tokens.
UNLIKE: dict[str, Callable[[int], list[Arguments]]] = {
    "linear": lambda t: [
        call(rows(t, 32), [matrix(4, 32)]),
        call(rows(t, 32, dtype=BF16), [matrix(4, 32)]),
        call(rows(t, 32), [matrix(4, 32, dtype=BF16)]),
        call(rows(t, 32), [matrix(5, 32)]),
        call(rows(t, 64), [matrix(4, 64)]),
        call(rows(t, 32), [mxfp4(4, 32)]),
        call(rows(t, 32), [matrix(4, 32), mxfp4(4, 32)]),
        call(rows(t, 32), [matrix(4, 32)], torch.zeros(4)),
        call(rows(t, 32), [matrix(4, 32)], torch.zeros(4, dtype=BF16)),
    ],
    "embedding": lambda t: [
        call(torch.zeros(t, dtype=torch.int64), table, dtype)
        for table in (matrix(4, 32), matrix(5, 32), matrix(4, 64), mxfp4(4, 32))
        for dtype in (FP32, BF16)
    ],
    "routed_experts": lambda t: [
        routed(t),
        routed(t, k=3),
        routed(t, dtype=BF16),
        routed(t, experts(down=mxfp4(4, 32, 32))),
        routed(t, experts(gate_up=[mxfp4(4, 64, 32)])),
        routed(t, experts(gate_up=[matrix(4, 32, 32), matrix(4, 32, 32)])),
        routed(t, experts(gate_up_bias=torch.zeros(4, 64))),
        routed(t, experts(down_bias=torch.zeros(4, 32))),
        routed(t, experts(slots=torch.zeros(8, dtype=torch.int64))),
        routed(t, activation=GELU_TANH),
        routed(t, activation=ClampedSwiglu(7.0)),
        routed(t, activation=ClampedSwiglu(8.0)),
    ],
    "topk_softmax": lambda t: [
        call(rows(t, 8), 2),
        call(rows(t, 8, dtype=BF16), 2),
        call(rows(t, 16), 2),
        call(rows(t, 8), 3),
        call(rows(t, 8), 2, renormalise=False),
        call(rows(t, 8), 2, scale=2.0),
        call(rows(t, 8), 2, groups=2),
        call(rows(t, 8), 2, groups=2, top_groups=2),
    ],
    "softmax_topk": lambda t: [call(rows(t, 8), 2), call(rows(t, 16), 2), call(rows(t, 8), 3)],
    "sigmoid_topk": lambda t: [
        call(rows(t, 8), 2),
        call(rows(t, 16), 2),
        call(rows(t, 8), 3),
        call(rows(t, 8), 2, bias=torch.zeros(8)),
        call(rows(t, 8), 2, bias=torch.zeros(8, dtype=BF16)),
        call(rows(t, 8), 2, renormalise=False),
        call(rows(t, 8), 2, scale=2.0),
    ],
    "gated": lambda t: [
        call(rows(t, 8), SILU),
        call(rows(t, 16), SILU),
        call(rows(t, 8, dtype=BF16), SILU),
        call(rows(t, 8), GELU_TANH),
        call(rows(t, 8), ClampedSwiglu(7.0)),
    ],
    "rms_norm": lambda t: [
        call(rows(t, 8), torch.zeros(8), 1e-6),
        call(rows(t, 2, 8), torch.zeros(8), 1e-6),
        call(rows(t, 8), None, 1e-6),
        call(rows(t, 8), torch.zeros(8, dtype=BF16), 1e-6),
        call(rows(t, 8), torch.zeros(8), 1e-5),
        call(rows(t, 8), torch.zeros(8), 1e-6, offset=1.0),
    ],
    "add_rms_norm": lambda t: [
        call(rows(t, 8), rows(t, 8), torch.zeros(8), 1e-6),
        call(rows(t, 16), rows(t, 16), torch.zeros(16), 1e-6),
        call(rows(t, 8, dtype=BF16), rows(t, 8, dtype=BF16), torch.zeros(8), 1e-6),
        call(rows(t, 8), rows(t, 8), torch.zeros(8, dtype=BF16), 1e-6),
        call(rows(t, 8), rows(t, 8), torch.zeros(8), 1e-5),
        call(rows(t, 8), rows(t, 8), torch.zeros(8), 1e-6, offset=1.0),
    ],
    "gated_rms_norm": lambda t: [
        call(rows(t, 2, 8), rows(t, 2, 8), torch.zeros(8), 1e-6),
        call(rows(t, 3, 8), rows(t, 3, 8), torch.zeros(8), 1e-6),
        call(rows(t, 2, 8), rows(t, 2, 8, dtype=BF16), torch.zeros(8), 1e-6),
        call(rows(t, 2, 8), rows(t, 2, 8), torch.zeros(8), 1e-6, "sigmoid"),
    ],
    "l2_norm": lambda t: [call(rows(t, 8)), call(rows(t, 2, 8)), call(rows(t, 8), 1e-5)],
    "apply_rotary": lambda t: [
        call(rows(t, 2, 8), angles(t)),
        call(rows(t, 3, 8), angles(t)),
        call(rows(t, 2, 8, dtype=BF16), angles(t)),
        call(rows(t, 2, 8), angles(t, 4)),
        call(rows(t, 2, 8), angles(t, interleaved=True)),
    ],
    "write_kv": lambda t: [
        call(rows(t, 1, 8), rows(t, 1, 8), pages(), plan(t)),
        call(rows(t, 1, 8, dtype=BF16), rows(t, 1, 8, dtype=BF16), pages(), plan(t)),
        call(rows(t, 2, 8), rows(t, 2, 8), pages(heads=2), plan(t)),
        call(rows(t, 1, 8), rows(t, 1, 8), pages(KvFormat.FP8), plan(t)),
        call(rows(t, 1, 8), None, pages(shared=True), plan(t)),
    ],
    "rotate_and_write_kv": lambda t: [
        rotated(t),
        rotated(t, dtype=BF16),
        rotated(t, pages(KvFormat.INT8)),
        rotated(t, turning=angles(t, 4)),
        rotated(t, turning=angles(t, interleaved=True)),
        rotated(t, q_weight=torch.zeros(8), k_weight=torch.zeros(8), eps=1e-6),
        rotated(t, q_weight=torch.zeros(8), k_weight=torch.zeros(8), eps=1e-5),
        rotated(t, q_weight=torch.zeros(8, dtype=BF16), k_weight=torch.zeros(8, dtype=BF16), eps=1e-6),
    ],
    "paged_attention": lambda t: [
        call(rows(t, 2, 8), pages(), plan(t)),
        call(rows(t, 4, 8), pages(), plan(t)),
        call(rows(t, 2, 8, dtype=BF16), pages(), plan(t)),
        call(rows(t, 2, 8), pages(KvFormat.INT8), plan(t)),
        call(rows(t, 2, 8), pages(heads=2), plan(t)),
        call(rows(t, 2, 16), pages(key_dim=16), plan(t)),
        call(rows(t, 2, 16), pages(key_dim=16, shared=True), plan(t)),
        call(rows(t, 2, 8), pages(), plan(t, window=3)),
        call(rows(t, 2, 8), pages(), plan(t), scale=1.0),
        call(rows(t, 2, 8), pages(), plan(t), softcap=50.0),
        call(rows(t, 2, 8), pages(), plan(t), sinks=torch.zeros(2)),
        call(rows(t, 2, 8), pages(), plan(t), sinks=torch.zeros(2, dtype=BF16)),
    ],
    "causal_conv1d": lambda t: [
        convolved(t, 4, 3, False, "silu"),
        convolved(t, 4, 3, False, None),
        convolved(t, 5, 3, False, "silu"),
        convolved(t, 4, 4, False, "silu"),
        convolved(t, 4, 3, True, "silu"),
        convolved(t, 4, 3, False, "silu", dilation=2),
    ],
    "gated_delta_rule": lambda t: [delta(t), delta(t, heads=4), delta(t, dim=16), delta(t, dtype=BF16)],
    "draw_tokens": lambda t: [
        call(rows(t, 8), draws(t)),
        call(rows(t, 16), draws(t)),
        call(rows(t, 8), draws(t, candidates=5)),
    ],
}


def test_all_operations_are_here() -> None:
    assert set(UNLIKE) == set(CALLS)


@pytest.mark.parametrize("operation", UNLIKE)
def test_calls_that_are_unlike_have_other_sites_and_other_keys(operation: str) -> None:
    def site_and_key(arguments: Arguments) -> tuple[Any, str]:
        args, kwargs = arguments
        key = key_of(shapes_of(operation, named_arguments(operation, args, kwargs)))
        return CALLS[operation].site(*args, **kwargs), key

    some, more = (list(map(site_and_key, UNLIKE[operation](tokens))) for tokens in (3, 5))
    # However many tokens there are.
    assert some == more
    for (site, key), (other_site, other_key) in combinations(some, 2):
        assert site != other_site, key
        assert key != other_key
