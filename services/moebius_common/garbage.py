"""Keeps Python's garbage collector from stopping a process that streams."""

import gc

# Containers made and not yet freed between two collections. What ends a stream is freed by reference counts;
# only cycles wait for a collection.
_THRESHOLD = 20_000


def spare_what_is_there() -> None:
    """Call it when what lives for ever has been made.

    A full collection walks all containers: 150 ms in a gateway that has just started, with its modules and
    models of requests. From now on those are left alone, and collections are rarer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
