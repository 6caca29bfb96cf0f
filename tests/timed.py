"""What the mark `timed` means: three tries for a test that a pause of a busy machine may break."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

# Told once, when the garbage is collected, and of any test that came before: a further try would hide it.
TOLD_ONCE = "never retrieved|nraisable"
LIMIT = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    config.option.rerun_show_tracebacks = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # `-p no:rerunfailures` shows each failure as one, and so does a debugger.
    if config.pluginmanager.hasplugin("rerunfailures") and not config.option.usepdb:
        for item in items:
            if item.get_closest_marker("timed"):
                item.add_marker(pytest.mark.flaky(reruns=2, rerun_except=TOLD_ONCE))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[LIMIT] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest-timeout watches over the first try alone."""
    if getattr(item, "execution_count", 1) > 1 and LIMIT in item.stash:
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[LIMIT])


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """What other tests left is not walked by the collector meanwhile: measured CPU time is the test's own."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
