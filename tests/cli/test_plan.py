"""What `moebius up` starts: command lines that the services understand."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from moebius_cli.errors import CliError
from moebius_cli.plan import UpOptions, check_port, controller_command, gateway_command, plan_stack
from moebius_cli.state_dir import StateDir
from moebius_common.settings import read_settings
from moebius_controller.settings import ControllerSettings
from moebius_gateway.settings import GatewaySettings
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.settings import WorkerSettings

PORTS = (20_000, 20_001)
CHECKPOINT = Checkpoint(Path("/models/tiny"), "safetensors", {}, {}, "tiny moe")


@pytest.fixture
def options(tmp_path: Path) -> UpOptions:
    return UpOptions(2, None, "127.0.0.1", 8000, "cpu", "json", StateDir(tmp_path), "Hello?", False)


def test_each_command_line_is_understood(options: UpOptions) -> None:
    stack = plan_stack(options, CHECKPOINT, PORTS)
    for number, worker in enumerate(stack.workers):
        settings = read_settings(WorkerSettings, worker.argv[3:])
        assert (settings.model, settings.served_model_name) == ("/models/tiny", "tiny moe")
        assert (settings.listen, settings.device, settings.log_format) == (worker.listen, "cpu", "json")
        assert worker.log == options.state_dir.log(f"worker-{number}")
    gateway = read_settings(GatewaySettings, gateway_command(options, stack)[3:])
    assert gateway.listen == "127.0.0.1:8000"
    assert gateway.workers == tuple(worker.listen for worker in stack.workers)
    controller = read_settings(
        ControllerSettings, controller_command(options, options.state_dir.stack_file)[3:]
    )
    assert (controller.stack, controller.log_format) == (options.state_dir.stack_file, "json")


def test_clients_may_know_the_model_by_another_name(options: UpOptions) -> None:
    stack = plan_stack(replace(options, served_model_name="-other"), CHECKPOINT, PORTS)
    names = [read_settings(WorkerSettings, worker.argv[3:]).served_model_name for worker in stack.workers]
    assert names == ["-other"] * 2


def test_prometheus_finds_each_at_a_port_of_its_own(options: UpOptions) -> None:
    def served(options: UpOptions) -> list[str | None]:
        stack = plan_stack(options, CHECKPOINT, PORTS)
        gateway = read_settings(GatewaySettings, gateway_command(options, stack)[3:])
        command = controller_command(options, options.state_dir.stack_file)
        controller = read_settings(ControllerSettings, command[3:])
        workers = [read_settings(WorkerSettings, worker.argv[3:]) for worker in stack.workers]
        return [gateway.admin_listen, *(one.metrics_listen for one in (controller, *workers))]

    assert served(options) == [None] * 4
    expected = [f"127.0.0.1:{port}" for port in (9400, 9401, 9402, 9403)]
    assert served(replace(options, metrics_port=9400)) == expected
    local = Path(__file__).parents[2] / "deploy" / "local" / "prometheus.yml"
    assert all(target in local.read_text() for target in expected)


def test_workers_share_the_cpus(options: UpOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEBIUS_WORKER_THREADS", raising=False)
    monkeypatch.setattr("moebius_cli.plan.cpu_count", lambda: 8)

    def threads(workers: int) -> list[int]:
        stack = plan_stack(options, CHECKPOINT, range(20_000, 20_000 + workers))
        return [read_settings(WorkerSettings, worker.argv[3:]).threads for worker in stack.workers]

    assert threads(2) == [4, 4]
    assert threads(16) == [1] * 16
    monkeypatch.setenv("MOEBIUS_WORKER_THREADS", "3")
    assert threads(2) == [3, 3]


def test_a_link_keeps_its_name(options: UpOptions, tmp_path: Path) -> None:
    """In the Hub's cache a .gguf file is a link to one that is named by its content."""
    (tmp_path / "0f3a").touch()
    (tmp_path / "model.gguf").symlink_to(tmp_path / "0f3a")
    stack = plan_stack(options, replace(CHECKPOINT, path=tmp_path / "model.gguf"), PORTS)
    assert read_settings(WorkerSettings, stack.workers[0].argv[3:]).model == str(tmp_path / "model.gguf")


def test_a_relative_path_is_made_absolute(options: UpOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    stack = plan_stack(options, replace(CHECKPOINT, path=Path("models/tiny")), PORTS)
    assert read_settings(WorkerSettings, stack.workers[0].argv[3:]).model == "/tmp/models/tiny"


@pytest.mark.parametrize(
    ("host", "url", "listen"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000", "0.0.0.0:8000"),
        ("::", "http://127.0.0.1:8000", "[::]:8000"),
        ("::1", "http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_where_the_api_is(options: UpOptions, host: str, url: str, listen: str) -> None:
    options = replace(options, host=host)
    assert options.url == url
    command = gateway_command(options, plan_stack(options, CHECKPOINT, PORTS))
    assert read_settings(GatewaySettings, command[3:]).listen == listen


def test_a_free_port_passes_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CliError, match=f"--port {port + 1}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    check_port("localhost", port)


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(CliError, match=r"Cannot listen on no\.such\.host\.invalid:8000 .*an address"):
        check_port("no.such.host.invalid", 8000)
