"""Ports for servers of tests."""

import itertools
import os
import random
import socket
from contextlib import closing

from moebius_cli.ports import WORKER_PORTS

# Below those that the kernel gives to outgoing connections: it could give one to a client, even to the very
# client that tries to reach a server that is down, and that server could not come back. Above those that
# `moebius up` gives to workers.
PORTS = range(WORKER_PORTS.stop, 32_768)
# Of the processes that run tests side by side, each has a block of its own: some servers take ports in a row.
_BLOCKS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_BLOCK = len(PORTS) // _BLOCKS
# One that comes in the place of a dead one has the next number: there may be a "gw3" of 3.
_PLACE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _BLOCKS
_MINE = PORTS[_PLACE * _BLOCK :][:_BLOCK]
# One after another, so that none is given twice before the first who got it listens.
_NEXT = itertools.islice(itertools.cycle(_MINE), random.randrange(_BLOCK), None)


def free_port() -> int:
    """A port of loopback on which nobody listens now."""
    for port in _NEXT:
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
