"""What the docs name is there: flags, endpoints. Metrics are in tests/deploy."""

import re
from pathlib import Path

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
from moebius_worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
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
