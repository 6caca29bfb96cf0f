"""How long the other operations of a layer take in Triton on this GPU.

python -m tests.bench.gpu_operations
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moebius_kernels.activations import SILU
from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import plan_states_on_device
from moebius_kernels.rotary import Rotary, RotarySpec
from moebius_kernels.state_plan import StatePlan
from moebius_kernels.triton.activations import gated
from moebius_kernels.triton.causal_conv import causal_conv1d
from moebius_kernels.triton.gated_delta import gated_delta_rule
from moebius_kernels.triton.paged_attention import paged_attention
from moebius_kernels.triton.rms_norm import add_rms_norm, rms_norm
from moebius_kernels.triton.rotary import apply_rotary, rotate_and_write_kv
from moebius_kernels.triton.router import topk_softmax
from moebius_kernels.triton.sampling import Draws, draw_tokens
from moebius_kernels.triton.write_kv import write_kv
from tests.bench.gpu_attention import (
    DEVICE,
    LONGEST_PROMPT,
    MOST_LAYERS,
    SHAPES,
    allocate,
    captured,
    median_us,
    planned,
)


def rows_of(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device=DEVICE).bfloat16()


def operations_of(tokens: int) -> dict[str, Callable[[], Any]]:
    """What else a decoding layer launches, in Qwen3-30B-A3B's and Qwen3.6's sizes."""

    def rows(*sizes: int) -> torch.Tensor:
        return rows_of(tokens, *sizes)

    shape = SHAPES[0]
    x, residual, weight, head = rows(2048), rows(2048), rows(2048)[0], rows(128)[0]
    qkv, logits, gate_up = rows(40 * 128), rows(128), rows(2 * 768)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in qkv.split([4096, 512, 512], dim=1))
    plan, kv = planned(shape, [(100, 1)] * tokens), allocate(shape, 7 * tokens)
    angles = Rotary(RotarySpec(128, 1e6), DEVICE)(torch.full((tokens,), 100, device=DEVICE))
    states, convolved = torch.zeros(tokens, 32, 128, 128, device=DEVICE), rows(8192)
    kept, taps = (
        torch.zeros(tokens, 8192, 3, device=DEVICE).bfloat16(),
        torch.randn(8192, 4, device=DEVICE).bfloat16(),
    )
    linear = StatePlan(*(torch.arange(tokens, device=DEVICE) for _ in range(2)), ())
    delta_q, delta_k, delta_v = rows(16, 128), rows(16, 128), rows(32, 128)
    g, beta = -rows(32).float().abs(), rows(32).float().sigmoid()
    return {
        "rms_norm 2048": lambda: rms_norm(x, weight, 1e-6),
        "add_rms_norm 2048": lambda: add_rms_norm(x, residual, weight, 1e-6),
        "rms_norm heads": lambda: rms_norm(q, head, 1e-6),
        "apply_rotary": lambda: apply_rotary(q, angles),
        "write_kv": lambda: write_kv(k, v, kv, plan),
        "rotate_and_write_kv": lambda: rotate_and_write_kv(
            q, k, v, angles, kv, plan, q_weight=head, k_weight=head, eps=1e-6
        ),
        "paged_attention 101": lambda: paged_attention(q, kv, plan),
        "topk_softmax 128/8": lambda: topk_softmax(logits, 8),
        "gated 768": lambda: gated(gate_up, SILU),
        "causal_conv1d 8192": lambda: causal_conv1d(convolved, taps, None, kept, linear, "silu"),
        "gated_delta_rule 32": lambda: gated_delta_rule(delta_q, delta_k, delta_v, g, beta, states, linear),
    }


def main() -> None:
    """Microseconds each, in a graph of as many layers as models have."""

    def repeated(call: Callable[[], Any]) -> None:
        for _ in range(MOST_LAYERS):
            call()

    for tokens in (1, 128):
        for name, call in operations_of(tokens).items():
            us = median_us(captured(partial(repeated, call)), 7, MOST_LAYERS)
            print(f"{name:22s} {tokens:5d} rows {us:8.1f} us")
    tokens = LONGEST_PROMPT
    whole = plan_states_on_device([Span(0, tokens, ())], [0], DEVICE)
    args = rows_of(tokens, 16, 128), rows_of(tokens, 16, 128), rows_of(tokens, 32, 128)
    g, beta = -rows_of(tokens, 32).float().abs(), rows_of(tokens, 32).float().sigmoid()
    state = torch.zeros(1, 32, 128, 128, device=DEVICE)
    us = median_us(lambda: gated_delta_rule(*args, g, beta, state, whole), 5, 1)
    print(f"{'gated_delta_rule 32':22s} {tokens:5d} rows {us:8.1f} us")
    wide = torch.randn(128, 151936, device=DEVICE)
    column = torch.ones(128, device=DEVICE)
    for top_k, top_p in ((0, 1.0), (50, 0.9)):
        draws = Draws(
            column.long(),
            column.long(),
            column,
            (column * top_k).int(),
            column * top_p,
            column * float("-inf"),
            1024 if top_k else 0,
        )
        us = median_us(captured(partial(draw_tokens, wide, draws)), 5, 1)
        print(f"draw_tokens of 151936, top_k {top_k:3d}  128 rows {us:8.1f} us")


if __name__ == "__main__":
    main()
