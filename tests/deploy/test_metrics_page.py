"""docs/metrics.md is what the code says."""

import pytest

from deploy import catalog
from deploy.metrics_page import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make dashboards`"


@pytest.mark.parametrize("entry", {entry.name: entry for entry in catalog.everything().values()}.values())
def test_a_metric_is_named_as_prometheus_names_them(entry: catalog.Entry) -> None:
    assert entry.about
    assert (entry.type == "counter") == entry.name.endswith("_total")
    assert not {"le", "quantile", "instance", "job"} & {*entry.labels}
