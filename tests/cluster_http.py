"""The HTTP side of the API server in tests.cluster_fakes."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]


@dataclass
class Faults:
    """What the server does wrong from now on."""

    # Status of all answers instead of the right one.
    refuse: int | None = None
    # Seconds before a list is answered.
    list_delay: float = 0.0
    # Watches are accepted, and nothing is said on them, not even their end.
    silent: bool = False
    # Watches end at once.
    hasty: bool = False
    # Watches begin with 410: as the answer's status, or as an event.
    gone: str | None = None
    bookmarks: bool = True


@dataclass
class Asked:
    """A request that came."""

    method: str
    path: str
    query: dict[str, str]
    body: Any = None


class Store(Protocol):
    """What answers; all but `events` at once."""

    asked: list[Asked]
    faults: Faults

    def get(self, path: str) -> Object | None: ...

    def listed(self, collection: str, selector: str) -> Object: ...

    def expired(self, version: int) -> bool: ...

    def events(self, collection: str, selector: str, version: int, seconds: float) -> Iterator[bytes]: ...

    def create(self, collection: str, obj: Object) -> tuple[int, Object]: ...

    def replace(self, path: str, obj: Object) -> tuple[int, Object]: ...

    def patch(self, path: str, patch: Object) -> tuple[int, Object]: ...

    def delete(self, path: str, options: Object) -> tuple[int, Object]: ...


class Server(ThreadingHTTPServer):
    """On loopback; port 0 takes a free one."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, api: Store, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.api = api
        self.closed = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def _asked(self) -> Asked:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        asked = Asked(self.command, url.path, query, body)
        self.server.api.asked.append(asked)
        return asked

    def _answer(self, status: int, body: Object) -> None:
        data = json.dumps(body).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def _serve(self) -> None:
        if self.server.closed:  # on a connection from before
            self.close_connection = True
            return
        api = self.server.api
        # Before it is counted: whoever sees a watch in the count can cut it off.
        epoch, asked = api.epoch, self._asked()
        if api.faults.refuse is not None:
            self._answer(*status(api.faults.refuse, "Refused", "pods is forbidden"))
            return
        if asked.method == "GET" and asked.query.get("watch") in ("True", "true"):
            self._watch(asked, epoch)
            return
        match asked.method:
            case "GET":
                if (obj := api.get(asked.path)) is not None:
                    self._answer(200, obj)
                elif _is_collection(asked.path):
                    time.sleep(api.faults.list_delay)
                    self._answer(200, api.listed(asked.path, asked.query.get("labelSelector", "")))
                else:
                    self._answer(*status(404, "NotFound"))
            case "POST":
                self._answer(*api.create(asked.path, asked.body))
            case "PUT":
                self._answer(*api.replace(asked.path, asked.body))
            case "PATCH":
                self._answer(*api.patch(asked.path, asked.body))
            case "DELETE":
                options = dict(asked.body or {})
                if "gracePeriodSeconds" in asked.query:
                    options["gracePeriodSeconds"] = int(asked.query["gracePeriodSeconds"])
                self._answer(*api.delete(asked.path, options))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _watch(self, asked: Asked, epoch: int) -> None:
        api, version = self.server.api, int(asked.query["resourceVersion"])
        expired = api.faults.gone or ("event" if api.expired(version) else None)
        if expired == "status":
            self._answer(*status(410, "Expired"))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if expired:
                self._chunk(line("ERROR", status(410, "Expired")[1]))
            elif not api.faults.hasty:
                seconds = 3600 if api.faults.silent else float(asked.query.get("timeoutSeconds", 3600))
                selector = asked.query.get("labelSelector", "")
                for said in api.events(asked.path, selector, version, seconds, epoch):
                    self._chunk(said)
            self._chunk(b"")
        except OSError:
            self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def line(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def status(code: int, reason: str, message: str = "") -> tuple[int, Object]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message or reason}


def _is_collection(path: str) -> bool:
    """/api/v1/nodes, /apis/GROUP/VERSION/namespaces/NAMESPACE/leases ..., not /api/v1/nodes/NAME."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    return len(rest) in (1, 3)
