"""How the tokens of one step are divided among requests."""

from collections.abc import Sequence


def share_budget(budget: int, pending: Sequence[int]) -> list[int]:
    """How many tokens each request computes in the next step; the sum is at most `budget`.

    `pending` says how many known tokens each request has still to compute (at least one), oldest request
    first. A decode is a request with one. The rules, in order:

    1. Each decode gets its token, so that a prompt, however long, never stops the streams.
    2. Of the rest, the oldest request gets half, so that every prefill ends.
    3. What is left goes to the requests with the fewest pending tokens, the older first among equals, so
       that a short prompt need not wait for the end of a long one.
    """
    grants = [0] * len(pending)
    prefills: list[int] = []
    for index, count in enumerate(pending):
        if count > 1:
            prefills.append(index)
        elif budget:
            grants[index] = 1
            budget -= 1
    if prefills:
        oldest = prefills[0]
        grants[oldest] = min(pending[oldest], (budget + 1) // 2)
        budget -= grants[oldest]
        for index in sorted(prefills, key=pending.__getitem__):
            more = min(pending[index] - grants[index], budget)
            grants[index] += more
            budget -= more
    return grants
