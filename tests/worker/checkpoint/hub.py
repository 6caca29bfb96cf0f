"""As much of the Hugging Face Hub as `huggingface_hub` needs to download a repository."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repository: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serves one repository; yields the endpoint and the list of the files that were downloaded."""
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = urlparse(self.path).path
            resolve, api = f"/{repository}/resolve/{COMMIT}/", f"/api/models/{repository}"
            if path.startswith(resolve) and (name := path.removeprefix(resolve)) in files:
                if body:
                    downloaded.append(name)
                self.send(files[name], body)
            elif path.startswith(api + "/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                self.send(json.dumps(tree).encode(), body)
            elif path.startswith(api):
                siblings = [{"rfilename": name} for name in files]
                info = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
                self.send(json.dumps(info).encode(), body)
            else:
                self.send(b"{}", body, status=404, code="RepoNotFound")

        def send(self, data: bytes, body: bool, status: int = 200, code: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
