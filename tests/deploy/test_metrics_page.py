"""docs/metrics.md is what the code says."""

import re
from pathlib import Path

import pytest

from deploy import catalog
from deploy.metrics_page import PAGE, page

ROOT = PAGE.parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("charts/**/*.yaml"),
        *ROOT.glob("charts/**/*.tpl"),
    ]
)


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make dashboards`"


@pytest.mark.parametrize("entry", {entry.name: entry for entry in catalog.everything().values()}.values())
def test_a_metric_is_named_as_prometheus_names_them(entry: catalog.Entry) -> None:
    assert entry.about
    assert (entry.type == "counter") == entry.name.endswith("_total")
    assert not {"le", "quantile", "instance", "job"} & {*entry.labels}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_other_pages_and_the_chart_name_is_exported(page: Path) -> None:
    named = set(re.findall(r"\b(?:moebius_(?:gateway|worker|controller)_|vllm:)[a-z_0-9]+", page.read_text()))
    known = catalog.everything()
    assert named <= {*known, *(entry.name for entry in known.values())}
