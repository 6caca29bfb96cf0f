"""Metrics as Prometheus gets them."""

import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from moebius_common import http_listener
from moebius_common.http_listener import serve_http
from tests.waiting import PATIENCE

# Prometheus 2 asks so, Prometheus 3 with an escaping.
ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;version=0.0.4;q=0.5",
    "text/plain",
)


def test_names_keep_their_colons_whatever_is_asked_for() -> None:
    registry = CollectorRegistry()
    Counter("vllm:tokens", "Tokens", registry=registry).inc(3)
    port = serve_http("127.0.0.1:0", registry, {})
    for accept in ACCEPTS:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        assert "vllm:tokens_total 3.0" in answer.text.splitlines(), accept
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_an_address_that_is_taken_is_said() -> None:
    port = serve_http("127.0.0.1:0", CollectorRegistry(), {})
    with pytest.raises(OSError, match="in use"):
        serve_http(f"127.0.0.1:{port}", CollectorRegistry(), {})


def test_who_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_listener._Handler, "timeout", 0.1)
    port = serve_http("127.0.0.1:0", CollectorRegistry(), {})
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as silent:
        assert silent.recv(1) == b"", "the connection is closed"
    monkeypatch.undo()
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    assert not capfd.readouterr().err
