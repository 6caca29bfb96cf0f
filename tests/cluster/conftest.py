import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster import release
from tests.cluster.cluster import NAMESPACE, Cluster, run
from tests.cluster.faults import all_ready
from tests.cluster.load import Load, new_load

HERE = Path(__file__).parent
STREAMS = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(420))
            if "MOEBIUS_TEST_CLUSTER" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="needs a cluster: make test-cluster"))


class Report:
    """Seconds that were measured, by what."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, float]] = {}

    def add(self, name: str, **seconds: float) -> None:
        self.lines.setdefault(name, {}).update({key: round(value, 2) for key, value in seconds.items()})


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    measured = Report()
    yield measured
    path = Path("build/cluster-report.json")
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | measured.lines, indent=1))


class Scenes:
    """The release with so many workers; a scenario leaves it well, so that the next can use it."""

    def __init__(self, report: Report) -> None:
        self.cluster = Cluster()
        self.report = report
        self._workers = 0
        self._load: Load | None = None

    async def with_workers(self, workers: int = 2) -> Load:
        """Clients of a release with so many workers, all of which are ready."""
        if workers != self._workers:
            started = time.monotonic()
            await asyncio.to_thread(release.install, release.workers(workers))
            self.report.add(f"release with {workers} workers", ready=time.monotonic() - started)
            self._workers = workers
        await all_ready(self.cluster)
        if self._load is None:
            self._load = await new_load(release.url(), release.MODEL, STREAMS)
        return Load(self._load.url, self._load.model, self._load.undisturbed)

    def forget(self) -> None:
        """After the release is gone."""
        self._workers = 0


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scenes(report: Report) -> AsyncIterator[Scenes]:
    yield Scenes(report)
    await asyncio.to_thread(release.uninstall)
    await asyncio.to_thread(run, "kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found")
