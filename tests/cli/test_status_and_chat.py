"""`moebius status` and `moebius chat` where nothing runs, and the help of every command."""

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from typer.testing import CliRunner

from moebius_cli.main import app
from moebius_cli.status import show
from moebius_cli.view import GatewayView, StackView, WorkerView
from tests.cli.refusal import refused
from tests.cli.running_up import moebius
from tests.ports import free_port

COMMANDS = ("up", "status", "chat", "inspect", "preflight", "upcycle", "sim")


def run(*arguments: str | Path, **env: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
    return result.exit_code, result.output


def test_status_where_nothing_runs(tmp_path: Path) -> None:
    code, output = run("status", "--state-dir", tmp_path)
    assert code == 1
    assert "No stack runs here" in output
    assert "moebius up" in output


def test_status_as_json_where_nothing_runs(tmp_path: Path) -> None:
    code, output = run("status", "--json", "--state-dir", tmp_path)
    assert code == 1
    view = json.loads(output)
    assert view["running"] is False
    assert view["workers"] == []


def test_status_tells_of_a_fallback_level() -> None:
    plain = WorkerView("w0", "127.0.0.1:1", "w0.log", "READY", 1)
    view = StackView(
        True,
        gateway=GatewayView("http://127.0.0.1:8000", 1, True, ""),
        workers=(plain, replace(plain, name="w1", fallback_level=2, fallback_name="reference-kernels")),
    )
    console = Console(file=StringIO(), width=200)
    show(console, view)
    assert isinstance(console.file, StringIO)
    output = console.file.getvalue()
    assert "w1: runs on fallback level 2 (reference-kernels)" in output
    assert "w0: runs" not in output


def test_status_of_a_damaged_state_directory(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text("{")
    assert str(tmp_path / "up.json") in refused("status", "--state-dir", tmp_path)


def test_the_state_directory_follows_the_environment(tmp_path: Path) -> None:
    assert str(tmp_path / "moebius") in run("status", XDG_STATE_HOME=str(tmp_path))[1]
    assert str(tmp_path / "own") in run("status", MOEBIUS_STATE_DIR=str(tmp_path / "own"))[1]


def test_chat_where_nothing_runs(tmp_path: Path) -> None:
    assert "Start one: moebius up" in refused("chat", "Hello?", "--state-dir", tmp_path)


def test_chat_with_nobody_at_the_url() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert f"No gateway answers at {url}" in refused("chat", "Hello?", "--url", url)


@pytest.fixture
def guarded() -> Iterator[str]:
    """The URL of something like a gateway that wants a key, and repeats what was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = {"choices": [{"delta": {"content": f"{self.path} {asked['messages'][0]['content']}"}}]}
            self._answer(200, f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode())

        def _answer(self, status: int, body: bytes) -> None:
            if self.headers["Authorization"] != "Bearer secret":
                status, body = 401, b'{"error": {"message": "an API key is needed"}}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_chat_with_a_key_and_the_url_that_up_shows(guarded: str) -> None:
    for url in (guarded, f"{guarded}/v1", f"{guarded}/v1/"):
        code, output = run("chat", "Hello?", "--url", url, MOEBIUS_API_KEY="secret")
        assert (code, output) == (0, "/v1/chat/completions Hello?\n")


def test_chat_without_the_key_that_is_needed(guarded: str) -> None:
    assert refused("chat", "Hello?", "--url", guarded) == "Error: an API key is needed\n"


def test_a_conversation_survives_an_answer_that_fails() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["chat", "--url", url], input="Hello?\nAnd now?\n\n")
    assert result.exit_code == 0
    assert result.output.count(f"Error: No gateway answers at {url}") == 2


def test_what_is_asked_must_be_utf8(guarded: str) -> None:
    assert "is not UTF-8" in refused("chat", "K\udcf6ln?", "--url", guarded, "--api-key", "secret")
    typed = CliRunner().invoke(
        app, ["chat", "--url", guarded, "--api-key", "secret"], input=b"K\xf6ln?\nK?\n\n"
    )
    assert typed.exit_code == 0, typed.output
    assert "/v1/chat/completions K?" in typed.output


def test_an_answer_is_shown_as_far_as_the_terminal_can(guarded: str) -> None:
    done = moebius(*("chat", "Köln 🙂?", "--url", guarded, "--api-key", "secret"), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "K\\xf6ln \\U0001f642?" in done.stdout


def test_help_lists_every_command() -> None:
    code, output = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert command in output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command: str) -> None:
    code, output = run(command, "--help")
    assert code == 0
    assert f"moebius {command} " in output.partition("Example")[2]
