"""What is written in two places is the same in both."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS = ("charts", "deploy", "kernels", "proto", "services", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_installed_version_is_that_of_the_source() -> None:
    assert importlib.metadata.version("moebius") == PROJECT["version"]


def test_the_changelog_tells_of_what_is_not_released() -> None:
    headings = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    folders = "|".join(folder.name for folder in ROOT.iterdir() if folder.is_dir())
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    assert not [path for path in named if not (ROOT / path).exists()]
    # Sources also by the end of their path.
    sources = {f"/{path.relative_to(ROOT)}" for part in PARTS for path in (ROOT / part).rglob("*.py")}
    ends = re.findall(r"`([\w/]+\.py)`", text)
    assert not [end for end in ends if not any(path.endswith(f"/{end}") for path in sources)]


def test_the_readme_asks_the_model_that_is_served() -> None:
    from moebius_worker.demo import DEMO_NAME

    models = re.findall(r'model"?[:=] ?"([^"]+)"', (ROOT / "README.md").read_text())
    assert models
    assert set(models) == {DEMO_NAME}


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_console_scripts_load(script: str) -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=script)
    assert entry.value == PROJECT["scripts"][script]
    assert callable(entry.load())


def test_every_service_has_an_extra_for_its_image() -> None:
    packages = {path.name.removeprefix("moebius_") for path in (ROOT / "services").glob("moebius_*")}
    services = packages - {"common"}
    assert services <= set(PROJECT["optional-dependencies"])
