"""N-grams of token ids, and the rows of a table that they are hashed to."""

import torch

from moebius_kernels.state_plan import StatePlan


def ngrams(
    token_ids: torch.Tensor, states: torch.Tensor, plan: StatePlan, *, length: int, end: int
) -> torch.Tensor:
    """Each row's token and the `length - 1` before it, the nearest first: int64 [T, length].

    What lies before the text's first token, or before an `end` token that comes before the row's own, is
    `end` too. token_ids int64 [T]. `states` int64 [slots, length - 1] holds one more than the ids of each
    request's last tokens, the oldest first, and 0 where there were none; it is left for the next step.
    """
    marked = token_ids + 1
    windows = token_ids.new_empty(len(token_ids), length)
    if len(plan.rows):
        tokens = torch.cat((states.index_select(0, plan.slots), marked[plan.rows].unsqueeze(1)), dim=1)
        windows.index_copy_(0, plan.rows, tokens)
        states.index_copy_(0, plan.slots, tokens[:, 1:])
    for segment in plan.segments:
        tokens = torch.cat((states[segment.slot], marked[segment.first_row : segment.last_row]))
        windows[segment.first_row : segment.last_row] = tokens.unfold(0, length, 1)
        states[segment.slot] = tokens[len(tokens) - length + 1 :]
    windows = windows.flip(-1)
    ends = (windows == end + 1) | (windows == 0)
    # The row's own token ends nothing that is before it.
    ends[:, 0] = False
    return (windows - 1).masked_fill_(ends.cumsum(dim=-1) > 0, end)


def hashed_rows(
    grams: torch.Tensor, multipliers: torch.Tensor, sizes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows of a table, int64 [T, H], for `ngrams` [T, N]: H / (N - 1) for the bigram, then the trigram ...

    The tokens of an n-gram, times `multipliers` [N], are combined by exclusive or; head h takes that modulo
    `sizes[h]` and adds `offsets[h]`. Products must fit into 63 bits.
    """
    products = grams * multipliers
    mixed, mixes = products[:, 0], []
    for place in range(1, grams.shape[1]):
        mixed = mixed ^ products[:, place]
        mixes.append(mixed)
    heads = len(sizes) // len(mixes)
    return torch.stack(mixes, dim=1).repeat_interleave(heads, dim=1) % sizes + offsets
