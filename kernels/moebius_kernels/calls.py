"""What the calls of each operation consist of: the part that is the model's, and the part that is the step's.

Two calls that agree in the first are calls of one *site*: whatever computes one computes the other, save that
the number of tokens may differ.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch

from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.operations import REFERENCE
from moebius_kernels.router import Route
from moebius_kernels.sampling import Draws


@dataclass(frozen=True, slots=True)
class TensorShape:
    """`dtype` as in "bfloat16". Without the leading dimension where that counts tokens, pages or slots."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class MatrixShape:
    format: Format
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.format!r}[{','.join(map(str, self.shape))}]".replace("torch.", "")


@dataclass(frozen=True, slots=True)
class Call:
    """How an operation is called.

    `rows`: parameters whose tensors have one row a token. `pools`: those whose tensors have one a page or a
    slot. `step`: those that say which rows belong together, different in each step, and what of each is the
    model's nevertheless. `written`: those changed in place. `site` takes the call's arguments, and next to no
    time. `in_graphs`: it is part of the CUDA graphs of decode steps.
    """

    rows: tuple[str, ...]
    site: Callable[..., Hashable]
    pools: tuple[str, ...] = ()
    step: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    in_graphs: bool = True


def _blocks(blocks: Sequence[StoredMatrix]) -> Hashable:
    if len(blocks) == 1:
        return blocks[0].format, blocks[0].shape
    return tuple((block.format, block.shape) for block in blocks)


def _tensor(tensor: torch.Tensor | None) -> Hashable:
    return None if tensor is None else tensor.dtype


def _row(rows: torch.Tensor) -> Hashable:
    return rows.dtype, rows.shape[1:]


def _linear(x: torch.Tensor, blocks: Sequence[StoredMatrix], bias: torch.Tensor | None = None) -> Hashable:
    # Its width is that of the blocks.
    return x.dtype, _blocks(blocks), _tensor(bias)


def _embedding(token_ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> Hashable:
    return table.format, table.shape, dtype


def _routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, *rest: Any, **named: Any
) -> Hashable:
    form = _blocks(weights.gate_up), weights.down.format, weights.down.shape
    extras = tuple(map(_tensor, (weights.gate_up_bias, weights.down_bias, weights.slots)))
    return x.dtype, route.experts.shape[1], form, extras, rest, *named.items()


def _scores(logits: torch.Tensor, *rest: Any, **named: Any) -> Hashable:
    return _row(logits), rest, *named.items()


def _sigmoid_topk(
    logits: torch.Tensor, top_k: int, *, bias: torch.Tensor | None = None, **named: Any
) -> Hashable:
    return _row(logits), top_k, _tensor(bias), *named.items()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, *rest: Any, **named: Any) -> Hashable:
    return _row(x), _tensor(weight), rest, *named.items()


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any
) -> Hashable:
    return _row(x), weight.dtype, rest, *named.items()


def _gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any
) -> Hashable:
    return _row(x), z.dtype, weight.dtype, rest, *named.items()


def _apply_rotary(x: torch.Tensor, angles: Any) -> Hashable:
    return _row(x), angles.cos.shape[-1], angles.interleaved


def _pages(kv_pages: KvPages) -> Hashable:
    keys = kv_pages.keys
    return keys.format, _row(keys.numbers), kv_pages.value_dim, kv_pages.values is None


def _write_kv(k: torch.Tensor, v: torch.Tensor | None, kv_pages: KvPages, plan: Any) -> Hashable:
    return k.dtype, _pages(kv_pages)


def _rotate_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: Any,
    kv_pages: KvPages,
    plan: Any,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    **named: Any,
) -> Hashable:
    norms = _tensor(q_weight), _tensor(k_weight)
    return _apply_rotary(q, angles), _pages(kv_pages), norms, *named.items()


def _paged_attention(
    q: torch.Tensor, kv_pages: KvPages, plan: Any, *, sinks: torch.Tensor | None = None, **named: Any
) -> Hashable:
    return _row(q), _pages(kv_pages), plan.window, _tensor(sinks), *named.items()


def _causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    plan: Any,
    *rest: Any,
    **named: Any,
) -> Hashable:
    return _row(x), weight.dtype, weight.shape, _tensor(bias), _row(states), rest, *named.items()


def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    plan: Any,
) -> Hashable:
    return _row(q), _row(v), g.dtype, beta.dtype, _row(states)


def _draw_tokens(logits: torch.Tensor, draws: Draws) -> Hashable:
    return _row(logits), draws.truncated


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        "linear": Call(("x",), _linear),
        "embedding": Call(("token_ids",), _embedding),
        "routed_experts": Call(("x", "route"), _routed_experts),
        "topk_softmax": Call(("logits",), _scores),
        "softmax_topk": Call(("logits",), _scores),
        "sigmoid_topk": Call(("logits",), _sigmoid_topk),
        "gated": Call(("gate_up",), _scores),
        "rms_norm": Call(("x",), _rms_norm),
        "add_rms_norm": Call(("x", "residual"), _add_rms_norm),
        "gated_rms_norm": Call(("x", "z"), _gated_rms_norm),
        "l2_norm": Call(("x",), _scores),
        "apply_rotary": Call(("x", "angles"), _apply_rotary),
        "write_kv": Call(
            ("k", "v"), _write_kv, pools=("kv_pages",), step={"plan": ()}, written=("kv_pages",)
        ),
        "rotate_and_write_kv": Call(
            ("q", "k", "v", "angles"),
            _rotate_and_write_kv,
            pools=("kv_pages",),
            step={"plan": ()},
            written=("kv_pages",),
        ),
        "paged_attention": Call(("q",), _paged_attention, pools=("kv_pages",), step={"plan": ("window",)}),
        "causal_conv1d": Call(
            ("x",), _causal_conv1d, pools=("states",), step={"plan": ()}, written=("states",)
        ),
        "gated_delta_rule": Call(
            ("q", "k", "v", "g", "beta"),
            _gated_delta_rule,
            pools=("states",),
            step={"plan": ()},
            written=("states",),
        ),
        "draw_tokens": Call(
            ("logits", "draws"), _draw_tokens, step={"draws": ("truncated",)}, in_graphs=False
        ),
    }
)


def named_arguments(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the reference's parameters, defaults included."""
    bound = signature(getattr(REFERENCE, operation)).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def shapes_of(operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is the model's of a call's arguments: `TensorShape`, `MatrixShape`, numbers, None, tuples of
    these, and mappings for records such as `ExpertWeights`."""
    call = CALLS[operation]
    shapes: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in call.step:
            shapes[name] = _shape(value, name in call.rows or name in call.pools)
        elif call.step[name]:
            shapes[name] = {attribute: getattr(value, attribute) for attribute in call.step[name]}
    return shapes


def key_of(shapes: Any) -> str:
    """`shapes_of` in words that are the same for every call of a site."""
    if isinstance(shapes, Mapping):
        return " ".join(
            f"{name}=({key_of(value)})" if isinstance(value, Mapping) else f"{name}={key_of(value)}"
            for name, value in shapes.items()
        )
    if isinstance(shapes, tuple):
        return f"({', '.join(map(key_of, shapes))})"
    return str(shapes)


def _shape(value: Any, leading: bool) -> Any:
    """`leading`: tensors have a leading dimension that is not the model's."""
    match value:
        case torch.Tensor():
            shape = tuple(value.shape[1:] if leading else value.shape)
            return TensorShape(str(value.dtype).removeprefix("torch."), shape)
        case StoredMatrix():
            return MatrixShape(value.format, value.shape)
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case Enum():
            return value.value
        case tuple() | list():
            return tuple(_shape(item, leading) for item in value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            kind = {"kind": type(value).__name__} if not fields(value) else {}
            return kind | {field.name: _shape(getattr(value, field.name), leading) for field in fields(value)}
        case _:
            return value
