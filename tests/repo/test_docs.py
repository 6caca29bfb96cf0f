"""What the docs name is there: flags, endpoints. Metrics are in tests/deploy."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from moebius_cli.main import app as moebius
from moebius_controller.settings import ControllerSettings
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.app import build_app, build_services
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_kernels.jit.cache import CACHE_DIR
from moebius_kernels.operations import OPERATION_NAMES
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = [file for part in ("kernels", "services") for file in (ROOT / part).rglob("*.py")]
SETTINGS: tuple[type[BaseSettings], ...] = (GatewaySettings, WorkerSettings, ControllerSettings)


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
    for program in (*(ROOT / "tests" / "bench").glob("*.py"), ROOT / "deploy" / "render" / "__main__.py"):
        found |= set(re.findall(r'add_argument\("(--[a-z-]+)"', program.read_text()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page: Path) -> None:
    # Those of other programs are their own business.
    text = re.sub(r"^(helm|kubectl|docker) .*$", "", page.read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert named <= flags()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_environment_variables_that_are_named_exist(page: Path) -> None:
    known = {"MOEBIUS_STATE_DIR", "MOEBIUS_API_KEY", "MOEBIUS_TEST_VALUES", "MOEBIUS_TEST_URL", "MOEBIUS_LAB"}
    known |= {CACHE_DIR}
    for settings in SETTINGS:
        prefix = settings.model_config["env_prefix"]
        known |= {(prefix + name).upper() for name in settings.model_fields}
    assert set(re.findall(r"\bMOEBIUS_[A-Z_]+\b", page.read_text())) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_methods_that_are_named_exist(page: Path) -> None:
    sources = "\n".join(file.read_text() for file in SOURCES)
    sources += (ROOT / "proto" / "moebius_proto" / "worker" / "v1" / "worker_pb2.pyi").read_text()
    for name, member in re.findall(r"`([A-Z]+[a-z]\w+)\.([a-z_]+)`", page.read_text()):
        body = re.search(rf"^class {name}\b.*?(?=^\S|\Z)", sources, re.MULTILINE | re.DOTALL)
        assert body is not None, name
        assert re.search(rf"^    (?:(?:async )?def )?{member}\b", body[0], re.MULTILINE), f"{name}.{member}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_backends_that_are_named_exist(page: Path) -> None:
    kernels = "\n".join(file.read_text() for file in (ROOT / "kernels").rglob("*.py"))
    named = re.findall(rf"\b({'|'.join(OPERATION_NAMES)}):(\w+)", page.read_text())
    assert not [
        f"{operation}:{name}"
        for operation, name in named
        if not re.search(rf'Backend\(\s*"{operation}",\s*"{name}",', kernels)
    ]


def test_the_page_of_the_chart_names_values_that_there_are() -> None:
    def paths(schema: dict[str, Any], before: str = "") -> Iterator[str]:
        for name, part in schema.get("properties", {}).items():
            yield f"{before}.{name}"
            yield from paths(part, f"{before}.{name}")

    there = tuple(paths(json.loads((ROOT / "charts" / "moebius" / "values.schema.json").read_text())))
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    named = set(re.findall(r"`([a-z]\w*(?:\.[a-z]\w*)+)[`:]", text)) - {"values.yaml"}
    assert len(named) > 10
    # A key of `worker` is also one of each model, and is told without it.
    assert not [name for name in named if not any(path.endswith(f".{name}") for path in there)]


def test_the_page_of_the_protocol_names_its_calls_and_reasons() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    calls = set(re.findall(r"^\| `(\w+)", text[: text.index("## The stream")], re.MULTILINE))
    assert calls - {"grpc"} == {method.name for method in pb.DESCRIPTOR.services_by_name["Worker"].methods}
    table = text[text.index("## Errors") : text.index("## TLS")]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    reasons = {name for row in rows for name in re.findall(r"\w+", row)}
    assert {f"REASON_{name}" for name in reasons} == {*pb.Reason.keys()} - {"REASON_UNSPECIFIED"}


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
