"""Ports for servers of tests."""

import random
import socket
from contextlib import closing

# Below those that the kernel gives to outgoing connections: it could give one to a client, even to the very
# client that tries to reach a server that is down, and that server could not come back.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port of loopback on which nobody listens now."""
    while True:
        port = random.choice(PORTS)
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
