"""What is served over HTTP: /metrics, /healthz and /readyz, answered from memory by threads of their own."""

import socket
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer

from moebius_common.address import split_address
from moebius_common.build_info import metrics_app

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def serve_http(
    address: str, registry: CollectorRegistry, alive: Callable[[], bool], ready: Callable[[], bool]
) -> WSGIServer:
    """Until the process ends. Ends it at once if the address cannot be had.

    `alive`: the loop turns. `ready`: the workers can be seen; who does not lead is ready as well.
    """
    metrics = metrics_app(registry)
    checks = {"/healthz": alive, "/readyz": ready}

    def application(environment: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        check = checks.get(environment["PATH_INFO"])
        if check is None:
            return metrics(environment, start_response)
        good = check()
        start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if good else b"not now\n"]

    host, port = split_address(address)

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = make_server(host, port, application, Server, _Quiet)
    except OSError as error:
        sys.exit(
            f"moebius-controller: cannot serve metrics on {address} ({error.strerror}): "
            "choose another with --metrics-listen"
        )
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
