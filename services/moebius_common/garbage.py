"""Keeps Python's garbage collector from stopping a process that streams, or starts."""

import gc

# Containers made and not yet freed between two collections. What ends a stream is freed by reference counts;
# only cycles wait for a collection.
_THRESHOLD = 20_000


def collect_nothing_yet() -> None:
    """Call it when a start begins that is going to make a lot that stays: collections would walk all of it
    again and again, which was half of the time that it took to import an engine and to plan its weights."""
    gc.disable()


def spare_what_is_there() -> None:
    """Call it when what lives for ever has been made.

    A full collection walks all containers: 150 ms in a gateway that has just started, with its modules and
    models of requests. From now on those are left alone, and collections are rarer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
    gc.enable()
