"""Where a prefill stops for a snapshot of what its linear-attention layers know.

There are places where it must stop: `marks`, which are the end of the last full page of its text, where the
next turn of a conversation goes on, and the page at which it leaves a text that others have gone on from.
And there are places where it had better stop, if it does not go on to one of those: the multiples of an
interval.
"""

from collections.abc import Collection


def snapshot_interval(interval: int, page_size: int, length: int, spare_slots: int) -> int:
    """The interval for a text of `length` tokens: at least `interval`, and whole pages.

    One text fills no more than a quarter of `spare_slots`, so that it does not push out all others.
    """
    at_most = max(1, spare_slots // 4)
    interval = max(interval, -(-length // at_most))
    return -(-interval // page_size) * page_size


def chunk_end(start: int, end: int, marks: Collection[int], interval: int) -> int:
    """Where a chunk that begins at `start` and may reach `end` ends."""
    ahead = [mark for mark in marks if mark > start]
    if not ahead:
        # All that follows is decoding.
        return end
    if end >= min(ahead):
        return min(ahead)
    aligned = end // interval * interval
    return aligned if aligned > start else end


def wants_snapshot(end: int, marks: Collection[int], interval: int) -> bool:
    """Whether a chunk that ends at `end` leaves a snapshot."""
    return end in marks or (end % interval == 0 and end < max(marks, default=0))
