"""What is asked of the front by HTTP: metrics, and probes of clusters that cannot probe by gRPC."""

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry

from moebius_common.address import split_address
from moebius_common.build_info import metrics_app

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse

# Whether the answer is yes; asked in threads, so it only reads.
Probe = Callable[[], bool]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes are no news."""


def serve_http(address: str, registry: CollectorRegistry, probes: dict[str, Probe]) -> int:
    """Answers in threads of its own: /metrics, and a path for each probe with 200 or 503. Returns the port.

    Raises OSError if it is taken.
    """
    metrics = metrics_app(registry)

    def answer(environ: dict[str, Any], start: "StartResponse") -> Iterable[bytes]:
        probe = probes.get(environ["PATH_INFO"])
        if probe is None:
            return metrics(environ, start)
        well = probe()
        start("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"yes\n" if well else b"no\n"]

    host, port = split_address(address)
    server = make_server(host, port, answer, _ServerV6 if ":" in host else _Server, handler_class=_Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port
