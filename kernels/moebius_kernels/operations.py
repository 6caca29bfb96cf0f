"""The operations that models are made of, as one value: which implementation of each is used."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from moebius_kernels.activations import gated
from moebius_kernels.causal_conv import causal_conv1d
from moebius_kernels.experts import routed_experts
from moebius_kernels.fused import add_rms_norm, rotate_and_write_kv
from moebius_kernels.gated_delta import gated_delta_rule
from moebius_kernels.linear import embedding, linear
from moebius_kernels.paged_attention import paged_attention, write_kv
from moebius_kernels.rms_norm import gated_rms_norm, l2_norm, rms_norm
from moebius_kernels.rotary import apply_rotary
from moebius_kernels.router import Route, sigmoid_topk, softmax_topk, topk_softmax
from moebius_kernels.sampling import Drawn, draw_tokens

Operation = Callable[..., torch.Tensor]
Router = Callable[..., Route]
Pair = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Draw = Callable[..., Drawn]


@dataclass(frozen=True, slots=True)
class Operations:
    """A function for each operation, with the signature and the meaning of the reference it stands for.

    The leading dimension of an operation's first argument counts tokens. Models make all calls but those of
    `draw_tokens`, which comes after them.
    """

    linear: Operation = linear
    embedding: Operation = embedding
    routed_experts: Operation = routed_experts
    topk_softmax: Router = topk_softmax
    softmax_topk: Router = softmax_topk
    sigmoid_topk: Router = sigmoid_topk
    gated: Operation = gated
    rms_norm: Operation = rms_norm
    add_rms_norm: Pair = add_rms_norm
    gated_rms_norm: Operation = gated_rms_norm
    l2_norm: Operation = l2_norm
    apply_rotary: Operation = apply_rotary
    write_kv: Operation = write_kv
    rotate_and_write_kv: Operation = rotate_and_write_kv
    paged_attention: Operation = paged_attention
    causal_conv1d: Operation = causal_conv1d
    gated_delta_rule: Operation = gated_delta_rule
    draw_tokens: Draw = draw_tokens


REFERENCE = Operations()
OPERATION_NAMES = tuple(field.name for field in fields(Operations))
