"""How the tokens of one step are divided among requests."""

from collections.abc import Sequence


def share_budget(
    budget: int, pending: Sequence[int], starts: Sequence[int] | None = None, keys_per_token: int = 1
) -> list[int]:
    """How many tokens each request computes in the next step; the sum is at most `budget`.

    `pending` says how many known tokens each request has still to compute (at least one), the most urgent
    request first. A decode is a request with one. The rules, in order:

    1. Each decode gets its token, so that a prompt, however long, never stops the streams.
    2. Of the rest, the first prefill gets half, so that every prefill ends.
    3. What is left goes to the requests with the fewest pending tokens, the more urgent first among equals,
       so that a short prompt need not wait for the end of a long one.

    `starts`, if given, says at which position each one goes on. Then a prefill's token costs more than 1: the
    `keys_per_token`-th part of the keys that it attends to comes on top, at most. The decodes in the step
    wait for that too. The first prefill gets a token even if it costs more than there is.
    """
    grants = [0] * len(pending)
    prefills: list[int] = []
    for index, count in enumerate(pending):
        if count > 1:
            prefills.append(index)
        elif budget:
            grants[index] = 1
            budget -= 1
    if not prefills or not budget:
        return grants
    # In this unit a token costs `keys_per_token` and each key that it attends to costs 1.
    unit = keys_per_token if starts else 1
    average_chunk = budget // 2 if starts else 0
    rest = budget * unit

    def grant(index: int, limit: int, least: int = 0) -> None:
        nonlocal rest
        price = unit + (starts[index] + average_chunk if starts else 0)
        more = min(pending[index] - grants[index], max(limit // price, least))
        grants[index] += more
        rest -= more * price

    grant(prefills[0], (budget + 1) // 2 * unit, least=1)
    for index in sorted(prefills, key=pending.__getitem__):
        grant(index, max(0, rest))
    return grants
