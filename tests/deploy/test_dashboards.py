"""The dashboards' JSON is that of their code, and each panel says what it shows."""

import json
from typing import Any

import pytest

from deploy.boards.all import BOARDS
from tests.deploy.queries import DASHBOARDS, DEPLOY, RULES, of_dashboards, parsed

LOADED = {file.stem: json.loads(file.read_text()) for file in DASHBOARDS}
PANELS = [
    (f"{name}: {panel['title']}", panel)
    for name, board in LOADED.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]


def test_the_json_is_current() -> None:
    grafana = pytest.importorskip("deploy.boards.grafana", reason="grafana-foundation-sdk is not installed")
    written = {f"moebius-{board.name}": grafana.write(board) for board in BOARDS}
    kept = {file.stem: file.read_text() for file in DASHBOARDS}
    assert kept == written, "run `make dashboards`"


def test_there_are_the_five_that_the_pages_tell_of() -> None:
    titles = [board["title"] for board in LOADED.values()]
    assert sorted(titles) == [
        f"Moebius / {name}" for name in ("Fleet", "MoE", "Overview", "Recovery", "Serving")
    ]
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert all(f"| {title.removeprefix('Moebius / ')} |" in page for title in titles)


@pytest.mark.parametrize("name", LOADED)
def test_a_dashboard_fits_any_prometheus(name: str) -> None:
    board = LOADED[name]
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "namespace": "query", "job": "query", "model": "query"}
    assert board["uid"] == name
    sources = {target["datasource"]["uid"] for _, panel in PANELS for target in panel["targets"]}
    assert sources == {"${datasource}"}


@pytest.mark.parametrize(("where", "panel"), PANELS, ids=[where for where, _ in PANELS])
def test_a_panel_teaches(where: str, panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 30, "says neither what it shows nor what is good"
    assert panel["fieldConfig"]["defaults"]["unit"]
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24


def test_every_query_is_promql() -> None:
    for query in of_dashboards():
        parsed(query)


def test_no_panel_is_there_twice_on_a_dashboard() -> None:
    assert len({where for where, _ in PANELS}) == len(PANELS)


def test_the_chart_has_copies_of_dashboards_and_rules() -> None:
    chart = DEPLOY.parent / "charts" / "moebius" / "files"
    for ours, theirs in ((DASHBOARDS, chart / "dashboards"), (RULES, chart / "rules")):
        kept = {file.name: file.read_text() for file in theirs.iterdir()}
        assert kept == {file.name: file.read_text() for file in ours}, "run `make dashboards`"
