"""What the mark `timed` means: three tries for a test that a pause of a busy machine may break."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

# Of these a further try would tell nothing, or hide something: what is told once, when the garbage is
# collected, of any test that came before, alone or among a teardown's errors; a try that took all its time,
# whose task may still run in a loop of the module's; and what no pause makes.
FINAL = r"never retrieved|nraisable|errors (during test teardown|while tearing down)|Timeout \(>|^WrongError:"
LIMIT = pytest.StashKey[Any]()


class WrongError(AssertionError):
    """No pause makes it: there are no further tries."""


def same(found: object, expected: object) -> None:
    """Of what must be right whatever the time. Raises WrongError."""
    try:
        assert found == expected
    except AssertionError as error:
        raise WrongError(str(error)) from None


def pytest_configure(config: pytest.Config) -> None:
    config.option.rerun_show_tracebacks = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # `-p no:rerunfailures` shows each failure as one, and so does a debugger.
    if config.pluginmanager.hasplugin("rerunfailures") and not config.option.usepdb:
        for item in items:
            if item.get_closest_marker("timed"):
                item.add_marker(pytest.mark.flaky(reruns=2, rerun_except=FINAL))


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
