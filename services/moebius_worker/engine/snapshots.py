"""Where a prefill stops for a snapshot of what its linear-attention layers know.

It stops at its *marks*: the end of the last full page of its text, where the next turn of a conversation goes
on, and the page at which it leaves a text that others have gone on from; and at the multiples of an interval.
"""

from collections.abc import Collection


def snapshot_interval(interval: int, page_size: int, length: int, spare_slots: int) -> int:
    """The interval for a text of `length` tokens: at least `interval`, and whole pages.

    One text fills no more than a quarter of `spare_slots`, so that it does not push out all others.
    """
    at_most = max(1, spare_slots // 4)
    interval = max(interval, -(-length // at_most))
    return -(-interval // page_size) * page_size


def next_stop(position: int, marks: Collection[int], interval: int) -> int | None:
    """Where a prefill that goes on from `position` stops next; None after the last mark."""
    ahead = [mark for mark in marks if mark > position]
    if not ahead:
        return None
    return min(*ahead, (position // interval + 1) * interval)


def is_stop(position: int, marks: Collection[int], interval: int) -> bool:
    return position in marks or (position % interval == 0 and position < max(marks))
