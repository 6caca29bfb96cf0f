"""Channels to workers, as all who ask them open theirs: plain, or TLS with the certificates that are in the
files at the moment. Written by hand.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class WorkerTls:
    """PEM files. `ca`: who signs the workers' certificates. `cert` and `key`: with which the client shows
    itself; None if workers do not ask. `name`: what the workers' certificates are made out to; None: the
    host that they are addressed by.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    name: str | None = None


@cache
def keep_grpc() -> grpc.aio.Channel:
    """Keeps what grpc.aio has for a process as a whole until the process ends. Called on the event loop.

    It is ended with the last channel else, and begun anew with the next: whenever the only worker is gone,
    and in the middle of the event loop, which waits for a thread of grpc's that may itself wait for the loop
    to read what it writes (github.com/grpc/grpc/pull/40989): the process would stand still for good.

    The threads that it begins never interrupt the loop's: of a thousand workers' reports each would, and in
    the midst of what a client waits for. They stay for the channel that is held, which leads nowhere.
    """
    usual = os.sched_getscheduler(0)
    with suppress(OSError):  # a sandbox may know one policy alone
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        grpc.aio.init_grpc_aio()
        # They begin with the first channel, and are like the thread that makes it.
        return grpc.aio.insecure_channel("localhost:1")
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, usual, os.sched_param(0))


def open_channel(
    address: str, tls: WorkerTls | None, options: Sequence[tuple[str, int | str]]
) -> grpc.aio.Channel:
    """Raises OSError if a file cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(),
        None if tls.key is None else tls.key.read_bytes(),
        None if tls.cert is None else tls.cert.read_bytes(),
    )
    named = (("grpc.ssl_target_name_override", tls.name),) if tls.name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*options, *named))
