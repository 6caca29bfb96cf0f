"""What the docs name is there: metrics, flags, endpoints; and no metric is left out."""

import re
from pathlib import Path

import pytest
import typer.main
from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from moebius_cli.main import app as moebius
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.settings import ControllerSettings
from moebius_gateway.admission.metrics import AdmissionMetrics
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.app import build_app, build_services
from moebius_gateway.auth.key_ring import KeyRing
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.state import WorkerState
from moebius_worker.metrics import RequestMetrics, WorkerCollector
from moebius_worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SETTINGS: tuple[type[BaseSettings], ...] = (GatewaySettings, WorkerSettings, ControllerSettings)


def exported() -> set[str]:
    """The metrics of all services, by the names under which Prometheus has them."""
    registry = CollectorRegistry()
    for metrics in (GatewayMetrics, DispatcherMetrics, AdmissionMetrics, ControllerMetrics):
        metrics(registry)
    KeyRing(None, registry)
    state = WorkerState(pid=1, model=worker_pb2.Model(id="m"))
    registry.register(WorkerCollector(state, Exchange(state, RequestMetrics(registry))))
    return {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in registry.collect()
        if metric.name.startswith(("moebius_", "vllm:"))
    }


def documented() -> set[str]:
    """The names in docs/metrics.md; `a_b_c`, `_d` stands for a_b_c and for what else ends in _d."""
    names: set[str] = set()
    stem = ""
    for name in re.findall(r"`((?:moebius_|vllm:|_)\w+)`", (ROOT / "docs" / "metrics.md").read_text()):
        if not name.startswith("_"):
            stem = name
            names.add(name)
        elif stem:
            cuts = {stem[: cut.start()] + name for cut in re.finditer("_", stem)}
            names |= cuts & exported() or {stem + name}
    return names


def test_the_page_of_metrics_is_complete_and_true() -> None:
    assert documented() == exported()


def flags() -> set[str]:
    """Of every command, service and bench."""
    commands = typer.main.get_command(moebius)
    assert isinstance(commands, typer.core.TyperGroup)
    found = {"--help"}
    left = [commands]
    while left:
        command = left.pop()
        found |= {option for parameter in command.params for option in parameter.opts}
        if isinstance(command, typer.core.TyperGroup):
            left += command.commands.values()
    for settings in SETTINGS:
        found |= {"--" + name.replace("_", "-") for name in settings.model_fields}
    for bench in (ROOT / "tests" / "bench").glob("*.py"):
        found |= set(re.findall(r'add_argument\("(--[a-z-]+)"', bench.read_text()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
    assert named <= flags()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_environment_variables_that_are_named_exist(page: Path) -> None:
    known = {"MOEBIUS_STATE_DIR", "MOEBIUS_API_KEY"}
    for settings in SETTINGS:
        prefix = settings.model_config["env_prefix"]
        known |= {(prefix + name).upper() for name in settings.model_fields}
    assert set(re.findall(r"\bMOEBIUS_[A-Z_]+\b", page.read_text())) <= known


async def test_the_page_of_the_api_names_the_endpoints_that_there_are() -> None:
    registry = CollectorRegistry()
    dispatcher = Dispatcher(DispatcherOptions(workers=(), gateway_id="g"), DispatcherMetrics(registry))
    app = build_app(build_services(GatewaySettings(), dispatcher, Lifecycle(), registry))
    served = {
        (method.upper(), re.sub(r"{\w+(:\w+)?}", "{id}", path))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    text = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"`(GET|HEAD|POST|DELETE) (/[\w/.{}]+)`", text)) == served
