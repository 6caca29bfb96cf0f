"""The gated delta rule: one token of each of many requests, or chunks of prompts."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels import gated_delta as reference
from moebius_kernels.device_plan import CHUNK_ROWS, DeviceStatePlan
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.state_plan import StatePlan
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping, power_of_two

_LARGEST_DIM = 256
_EPS = tl.constexpr(1e-6)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    """As `moebius_kernels.gated_delta.gated_delta_rule`. Products within a chunk are of numbers in v's dtype.

    Rows of requests whose slot is -1 become 0.
    """
    if plan.segments and not isinstance(plan, DeviceStatePlan):
        return reference.gated_delta_rule(q, k, v, g, beta, states, plan)
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    heads, value_dim = v.shape[1:]
    key_dim = q.shape[-1]
    strides = (
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        g.stride(0),
        beta.stride(0),
    )
    dims = {
        "HEADS": heads, "SHARED": heads // q.shape[1],
        "KEY_DIM": key_dim, "KEYS": max(16, power_of_two(key_dim)), "VALUE_DIM": value_dim,
    }  # fmt: skip
    values = max(16, power_of_two(value_dim))
    if count := len(plan.rows):
        # Few requests: more programs for each.
        width = min(values, 16 if count * heads < 256 else 32)
        launch(
            _one_token,
            (count * heads, ceil_div(value_dim, width)),
            q, k, v, g, beta, states, output, plan.rows, plan.slots, *strides,
            **dims, VALUES=width, num_warps=4, **overlapping(v),
        )  # fmt: skip
    if isinstance(plan, DeviceStatePlan) and plan.segments:
        tokens, chunks = len(v), len(plan.chunks)
        # Of each token and value head: query and key with their decays, what its update takes from the
        # state, and what it does not. Of each chunk: what its tokens take from its updates.
        queries, keys, from_state = (v.new_empty(tokens, heads, key_dim) for _ in range(3))
        fresh, attention = torch.empty_like(output), v.new_empty(chunks, heads, CHUNK_ROWS, CHUNK_ROWS)
        decays = torch.empty(chunks, heads, dtype=torch.float32, device=v.device)
        precision, stages = ("ieee", 1) if v.dtype == torch.float32 else ("tf32", 2)
        launch(
            _prepare,
            (chunks, heads),
            q, k, v, g, beta, queries, keys, from_state, fresh, attention, decays, plan.chunks, *strides,
            **dims, VALUES=values, CHUNK=CHUNK_ROWS, PRECISION=precision, num_warps=8, **overlapping(v),
        )  # fmt: skip
        width = min(values, 32)
        launch(
            _pass_states,
            (heads, ceil_div(value_dim, width), len(plan.segments)),
            queries, keys, from_state, fresh, attention, decays, states, output, plan.spans,
            **dims, VALUES=width, CHUNK=CHUNK_ROWS, PRECISION=precision, num_warps=4, num_stages=stages,
            **overlapping(v),
        )  # fmt: skip
    return output


@triton.jit
def _unit(x):
    """Rows of x [N, D] at length 1."""
    return x / tl.sqrt_rn(tl.sum(x * x, 1) + _EPS)[:, None]


@triton.jit
def _one_token(
    q, k, v, g, beta, states, output, request_rows, request_slots,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, beta_row,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One value head of one request, VALUES columns of its state."""
    request = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    key = tl.arange(0, KEYS)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(request_rows + request).to(tl.int64)
    slot = tl.load(request_slots + request).to(tl.int64)
    there = slot >= 0
    inside = in_key[:, None] & in_value[None, :] & there
    at = states + ((slot * HEADS + head) * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    state = tl.load(at, mask=inside, other=0.0)
    key_head = head // SHARED
    own_q = tl.load(q + row * q_row + key_head * q_head + key, mask=in_key, other=0.0).to(tl.float32)
    own_k = tl.load(k + row * k_row + key_head * k_head + key, mask=in_key, other=0.0).to(tl.float32)
    own_v = tl.load(v + row * v_row + head * v_head + value, mask=in_value, other=0.0).to(tl.float32)
    own_q = own_q / tl.sqrt_rn(tl.sum(own_q * own_q, 0) + _EPS) / tl.sqrt_rn(KEY_DIM * 1.0)
    own_k = own_k / tl.sqrt_rn(tl.sum(own_k * own_k, 0) + _EPS)
    state = state * tl.exp(tl.load(g + row * g_row + head).to(tl.float32))
    rate = tl.load(beta + row * beta_row + head).to(tl.float32)
    update = rate * (own_v - tl.sum(own_k[:, None] * state, 0))
    state += own_k[:, None] * update[None, :]
    tl.store(at, state, mask=inside)
    y = tl.where(there, tl.sum(own_q[:, None] * state, 0), 0.0)
    tl.store(output + (row * HEADS + head) * VALUE_DIM + value, y.to(output.dtype.element_ty), mask=in_value)


@triton.jit
def _prepare(
    q, k, v, g, beta, queries, keys, from_state, fresh, attention, decays, chunks,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, beta_row,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What of a chunk does not depend on the state before it, for one value head; see the reference."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.arange(0, CHUNK)
    row = tl.load(chunks + 4 * chunk).to(tl.int64) + index
    there = row < tl.load(chunks + 4 * chunk + 1)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    inside = there[:, None] & (key < KEY_DIM)[None, :]
    key_head = head // SHARED
    own_q = tl.load(q + (row * q_row + key_head * q_head)[:, None] + key[None, :], mask=inside, other=0.0)
    own_k = tl.load(k + (row * k_row + key_head * k_head)[:, None] + key[None, :], mask=inside, other=0.0)
    own_q = _unit(own_q.to(tl.float32)) / tl.sqrt_rn(KEY_DIM * 1.0)
    own_k = _unit(own_k.to(tl.float32))
    # Tokens that do not exist change nothing: no decay, nothing learnt.
    decay_log = tl.load(g + row * g_row + head, mask=there, other=0.0).to(tl.float32)
    rate = tl.load(beta + row * beta_row + head, mask=there, other=0.0).to(tl.float32)
    later = index[:, None] > index[None, :]
    # Each sum by itself: the difference of two long sums would lose digits.
    between = tl.cumsum(tl.where(later, decay_log[:, None], 0.0), 0)
    decay = tl.where(index[:, None] >= index[None, :], tl.exp(between), 0.0)
    since_start = tl.exp(tl.cumsum(decay_log, 0))
    products = tl.dot(own_k, own_k.T, input_precision=PRECISION)
    system = tl.where(later, rate[:, None] * products * decay, 0.0)
    # The inverse of 1 + system, row by row.
    inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for line in range(1, CHUNK):
        here = (index == line)[:, None]
        factors = tl.sum(tl.where(here, system, 0.0), 0)
        inverse -= tl.where(here, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    inside_v = there[:, None] & (value < VALUE_DIM)[None, :]
    own_v = tl.load(v + (row * v_row + head * v_head)[:, None] + value[None, :], mask=inside_v, other=0.0)
    updates = tl.dot(inverse, rate[:, None] * own_v.to(tl.float32), input_precision=PRECISION)
    taken = tl.dot(inverse, (rate * since_start)[:, None] * own_k, input_precision=PRECISION)
    weights = tl.dot(own_q, own_k.T, input_precision=PRECISION) * decay
    last = (index == CHUNK - 1)[:, None]
    to_end = tl.sum(tl.where(last, decay, 0.0), 0)
    at = (row * HEADS + head)[:, None] * KEY_DIM + key[None, :]
    dtype: tl.constexpr = queries.dtype.element_ty
    tl.store(queries + at, (since_start[:, None] * own_q).to(dtype), mask=inside)
    tl.store(keys + at, (to_end[:, None] * own_k).to(dtype), mask=inside)
    tl.store(from_state + at, taken.to(dtype), mask=inside)
    at = (row * HEADS + head)[:, None] * VALUE_DIM + value[None, :]
    tl.store(fresh + at, updates.to(dtype), mask=inside_v)
    base = attention + (chunk.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
    tl.store(base + index[:, None] * CHUNK + index[None, :], weights.to(dtype))
    tl.store(decays + chunk * HEADS + head, tl.exp(tl.sum(decay_log, 0)))


@triton.jit
def _pass_states(
    queries, keys, from_state, fresh, attention, decays, states, output, spans,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The chunks of one segment, one after another, for one value head and VALUES columns of its state."""
    head, segment = tl.program_id(0), tl.program_id(2)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    key, index = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(spans + 4 * segment)
    last = tl.load(spans + 4 * segment + 1)
    slot = tl.load(spans + 4 * segment + 2).to(tl.int64)
    first_chunk = tl.load(spans + 4 * segment + 3)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    at_state = states + ((slot * HEADS + head) * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    inside_state = in_key[:, None] & in_value[None, :]
    state = tl.load(at_state, mask=inside_state, other=0.0)
    dtype: tl.constexpr = queries.dtype.element_ty
    for number in range(0, tl.cdiv(last - first, CHUNK)):
        row = (first + number * CHUNK + index).to(tl.int64)
        there = row < last
        inside = there[:, None] & in_key[None, :]
        at = (row * HEADS + head)[:, None] * KEY_DIM + key[None, :]
        at_values = (row * HEADS + head)[:, None] * VALUE_DIM + value[None, :]
        inside_v = there[:, None] & in_value[None, :]
        chunk = (first_chunk + number).to(tl.int64)
        taken = tl.load(from_state + at, mask=inside, other=0.0)
        own_q = tl.load(queries + at, mask=inside, other=0.0)
        own_k = tl.load(keys + at, mask=inside, other=0.0)
        update = tl.load(fresh + at_values, mask=inside_v, other=0.0).to(tl.float32)
        weights = tl.load(
            attention + (chunk * HEADS + head) * CHUNK * CHUNK + index[:, None] * CHUNK + index[None, :]
        )
        decay = tl.load(decays + chunk * HEADS + head)
        known = state.to(dtype)
        update -= tl.dot(taken, known, input_precision=PRECISION)
        rounded = update.to(dtype)
        y = tl.dot(own_q, known, input_precision=PRECISION)
        y = tl.dot(weights, rounded, y, input_precision=PRECISION)
        tl.store(output + at_values, y.to(output.dtype.element_ty), mask=inside_v)
        state = tl.dot(own_k.T, rounded, state * decay, input_precision=PRECISION)
    tl.store(at_state, state, mask=inside_state)


def _admits(query: Query) -> str | None:
    dims = query.arguments["q"].shape[-1], query.arguments["v"].shape[-1]
    return f"heads of {dims}, it takes {_LARGEST_DIM}" if max(dims) > _LARGEST_DIM else None


BACKENDS = (
    Backend(
        "gated_delta_rule",
        "triton",
        gated_delta_rule,
        architectures=ARCHITECTURES,
        admits=_admits,
    ),
)
