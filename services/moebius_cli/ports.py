"""Ports of this machine for workers, which take seconds to listen there and come back after each death."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice

from moebius_cli.errors import CliError

HOST = "127.0.0.1"
# Below those that the kernel gives to outgoing connections: it could give one, while its worker is dead, to
# the very client that tries to reach it, and the worker could not come back.
WORKER_PORTS = range(20_000, 30_000)


@contextmanager
def hold_ports(count: int) -> Iterator[list[int]]:
    """Free ports of loopback, different ones in stacks that start at once; others are refused them meanwhile.

    Linux lets a second socket have a port if both allow it and the first does not listen. gRPC's servers do
    allow it, so our workers can listen there; whoever looks for a free port does not. Raises CliError.
    """
    with ExitStack() as held:
        drawn = random.sample(WORKER_PORTS, len(WORKER_PORTS))
        ports = list(islice((port for port in drawn if _hold(port, held)), count))
        if len(ports) < count:
            raise CliError(f"There are no {count} free ports for workers on {HOST}.")
        yield ports


def _hold(port: int, held: ExitStack) -> bool:
    holder = socket.socket()
    try:
        holder.bind((HOST, port))
    except OSError:
        holder.close()
        return False
    held.enter_context(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True
