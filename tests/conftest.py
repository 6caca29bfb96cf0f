"""Which tests may run side by side, where `make test` has two workers (pytest-xdist)."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Their tests start processes and watch clocks: one after the other, and share what a session starts.
TOGETHER = tuple(
    TESTS / name
    for name in (
        "cli",
        "controller",
        "faults",
        "gateway",
        "integration",
        "repo",
        "worker/front",
        "worker/preflight",
        "worker/sim",
    )
)
# Of the gateway's, those that only compute.
APART = (TESTS / "gateway" / "parsing",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _below(item.path, TOGETHER) and not _below(item.path, APART):
            item.add_marker(pytest.mark.xdist_group("processes"))
    # The long group first, so that the other worker computes meanwhile.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def _below(path: Path, directories: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)
