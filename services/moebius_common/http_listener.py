"""What Prometheus and probes ask of a service that has no HTTP of its own."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest

from moebius_common.address import split_address

# Whether the answer is yes; asked in threads, so it only reads.
Probe = Callable[[], bool]


def serve_http(address: str, registry: CollectorRegistry, probes: Mapping[str, Probe]) -> int:
    """Answers in threads of its own: a path for each probe with 200 or 503, /metrics. Returns the port.

    Metrics are always in the plain format: in OpenMetrics, for which Prometheus 2 asks first, the library
    writes `vllm_` for `vllm:`. Raises OSError if the address is taken.
    """

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        probe = probes.get(environment["PATH_INFO"])
        if probe is None:
            start("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
            return [generate_latest(registry)]
        well = probe()
        start("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"yes\n" if well else b"no\n"]

    host, port = split_address(address)
    server = make_server(host, port, answer, _ServerV6 if ":" in host else _Server, handler_class=_Handler)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server.server_port


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    # Seconds in which a peer must say what it wants: one that is gone without a word would keep its thread.
    timeout = 10.0

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes are no news."""
