"""Channels to workers: plain, or TLS with the certificates that are in the files at the moment."""

from dataclasses import dataclass
from pathlib import Path

import grpc

# Each session has a channel of its own, so that it resolves names anew, inherits no back-off, and reads
# certificates that were replaced.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


@dataclass(frozen=True, slots=True)
class WorkerTls:
    """PEM files. `ca`: who signs the workers' certificates. `cert` and `key`: with which the gateway shows
    itself; None if workers do not ask. `name`: what the workers' certificates are made out to; None: the
    host that they are addressed by.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    name: str | None = None


def keep_grpc() -> None:
    """Keeps what grpc.aio has for a process as a whole until the process ends. Called on the event loop.

    It is ended with the last channel else, and begun anew with the next: whenever the only worker is gone,
    and in the middle of the event loop, which waits for a thread of grpc's that may itself wait for the loop
    to read what it writes (github.com/grpc/grpc/pull/40989): the gateway would stand still for good.
    """
    grpc.aio.init_grpc_aio()


def open_channel(address: str, tls: WorkerTls | None) -> grpc.aio.Channel:
    """Raises OSError if a file cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(),
        None if tls.key is None else tls.key.read_bytes(),
        None if tls.cert is None else tls.cert.read_bytes(),
    )
    named = (("grpc.ssl_target_name_override", tls.name),) if tls.name else ()
    return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *named))
