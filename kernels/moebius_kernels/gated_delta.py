"""The gated delta rule: linear attention whose state forgets, and overwrites what it knows of a key.

With S [Dk, Dv] the state of a value head, each token does (arXiv 2412.06464)

    S <- exp(g) * S
    S <- S + k (beta * (v - S^T k))^T
    y  = S^T q
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from moebius_kernels.rms_norm import l2_norm
from moebius_kernels.state_plan import StatePlan

CHUNK = 64


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    """q and k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv] -> [T, Hv, Dv] in v's dtype; all in fp32.

    `g` is the logarithm of the decay, at most 0. q and k are normalised to length 1 here, and q divided by
    sqrt(Dk); value head h reads key head h // (Hv / Hk). `states` fp32 [slots, Hv, Dk, Dv] is where the
    requests' states are found and left.
    """
    shared = v.shape[1] // k.shape[1]
    tokens = _Tokens(
        (l2_norm(q.float()) * q.shape[-1] ** -0.5).repeat_interleave(shared, dim=1),
        l2_norm(k.float()).repeat_interleave(shared, dim=1),
        v.float(),
        g.float(),
        beta.float(),
    )
    output = torch.empty_like(v)
    if len(plan.rows):
        decoding = _Tokens(*(part.index_select(0, plan.rows) for part in tokens))
        y, after = _one_token(decoding, states.index_select(0, plan.slots))
        output.index_copy_(0, plan.rows, y.to(v.dtype))
        states.index_copy_(0, plan.slots, after)
    for segment in plan.segments:
        rows = slice(segment.first_row, segment.last_row)
        y, after = _chunked(_Tokens(*(part[rows] for part in tokens)), states[segment.slot])
        output[rows] = y.to(v.dtype)
        states[segment.slot] = after
    return output


class _Tokens(NamedTuple):
    """fp32: q and k [T, H, Dk], normalised and one for each value head, v [T, H, Dv], g and beta [T, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def _one_token(tokens: _Tokens, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of B requests; states [B, H, Dk, Dv]. Returns outputs [B, H, Dv] and new states."""
    q, k, v, g, beta = tokens
    states = states * g.exp()[..., None, None]
    known = (k.unsqueeze(-2) @ states).squeeze(-2)
    update = beta.unsqueeze(-1) * (v - known)
    states = states + k.unsqueeze(-1) * update.unsqueeze(-2)
    return (q.unsqueeze(-2) @ states).squeeze(-2), states


def _chunked(tokens: _Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The L tokens of one request; state [H, Dk, Dv]. Returns outputs [L, H, Dv] and the new state.

    With D[i, j] the decay between tokens j and i of a chunk, and S the state before it, the updates u and
    the outputs y of its tokens are

        u_i = beta_i (v_i - D[i, start] S^T k_i - sum_{j < i} D[i, j] (k_j . k_i) u_j)
        y_i = D[i, start] S^T q_i + sum_{j <= i} D[i, j] (k_j . q_i) u_j

    The first is a triangular system. What of its solution does not depend on S is found for all chunks at
    once, and then the state goes from chunk to chunk.
    """
    length = tokens.q.shape[0]
    # A short last chunk is filled with tokens that change nothing: beta and g are 0.
    fill = -length % CHUNK

    def split(rows: torch.Tensor) -> torch.Tensor:
        """[L, H, ...] -> [chunks, H, CHUNK, ...]"""
        padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, fill))
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q, k, v, g, beta = (split(rows) for rows in tokens)
    beta = beta.unsqueeze(-1)
    since_start = g.cumsum(dim=-1).exp().unsqueeze(-1)
    # Sums of g over j < l <= i, each summed by itself: the difference of two long sums would lose digits.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril(-1)
    between = g.unsqueeze(-1).masked_fill(~later, 0.0).cumsum(dim=-2)
    decay = between.exp().tril()
    system = beta * (k @ k.mT) * decay
    right_sides = torch.cat((beta * v, beta * since_start * k), dim=-1)
    # Only what lies below the diagonal is read, and the diagonal taken as ones.
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    fresh, from_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    attention = (q @ k.mT) * decay
    q = since_start * q
    to_end = decay[..., -1, :].unsqueeze(-1) * k
    outputs = torch.empty_like(v)
    for chunk in range(len(q)):
        update = fresh[chunk] - from_state[chunk] @ state
        outputs[chunk] = q[chunk] @ state + attention[chunk] @ update
        state = since_start[chunk, :, -1:] * state + to_end[chunk].mT @ update
    return outputs.transpose(1, 2).flatten(0, 1)[:length], state
