"""Dashboards and rules ask for what a running stack exports, and the catalog says what it exports."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy import catalog
from tests.deploy.queries import (
    TARGET_LABELS,
    Query,
    Selector,
    aggregations,
    of_dashboards,
    of_rules,
    parsed,
    rules,
    selectors,
)
from tests.ports import free_port

QUERIES = [*of_dashboards(), *of_rules()]
OURS = ("moebius_", "vllm:")
# Prometheus has them itself.
FOREIGN = {"ALERTS"}
# As Prometheus 2 asks.
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
READY_SECONDS = 60.0


@dataclass
class Scraped:
    """Of all services: the metrics by name, and the labels of each series by its name."""

    names: set[str] = field(default_factory=set)
    series: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("stack")
    port, metrics = free_port(), _ports_in_a_row(4)
    log = folder / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("moebius"), "up", "--engine", "sim", "--workers", "2"),
                *(
                    "--port",
                    str(port),
                    "--metrics-port",
                    str(metrics),
                    "--state-dir",
                    folder,
                    "--question",
                    "",
                ),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"MOEBIUS_WORKER_SIM": '{"itl": 0.001}'},
        )
    try:
        _answer(f"http://127.0.0.1:{port}", up, log)
        yield _scrape(range(metrics, metrics + 4))
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(40)


def _ports_in_a_row(count: int) -> int:
    """The first of them."""
    while True:
        first = free_port()
        with suppress(OSError), ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def _answer(url: str, up: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the stack has answered something, so that all was counted once."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    deadline = time.monotonic() + READY_SECONDS
    while True:
        assert up.poll() is None, log.read_text()
        try:
            if httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _scrape(ports: range) -> Scraped:
    found = Scraped()
    for port in ports:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": ACCEPT})
        for family in text_string_to_metric_families(answer.text):
            found.names.add(family.name + ("_total" if family.type == "counter" else ""))
            for sample in family.samples:
                found.series[sample.name].append(dict(sample.labels))
    return found


def test_the_catalog_is_what_is_exported(scraped: Scraped) -> None:
    entries = catalog.everything()
    assert {entry.name for entry in entries.values()} == {
        name for name in scraped.names if name.startswith(OURS)
    }
    for name, series in scraped.series.items():
        if name.startswith(OURS):
            assert {frozenset(labels) for labels in series} == {entries[name].labels_of(name)}, name


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_what_is_asked_for_is_exported(query: Query, scraped: Scraped) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for selector in selectors(parsed(query)):
        if selector.name is None:
            assert _names(selector, scraped), query.text
        elif selector.name not in FOREIGN | recorded:
            assert selector.name in catalog.everything() or selector.name in scraped.series, query.text
            _check_matchers(selector, scraped)


def _names(selector: Selector, scraped: Scraped) -> list[str]:
    [pattern] = [value for label, _, value in selector.matchers if label == "__name__"]
    return [name for name in scraped.series if re.fullmatch(pattern, name)]


def _check_matchers(selector: Selector, scraped: Scraped) -> None:
    """Labels are those of the metric; values occur, if there are series at all."""
    assert selector.name is not None
    entry = catalog.everything().get(selector.name)
    # What the client library exports has no entry.
    labels = entry.labels_of(selector.name) if entry else frozenset()
    for label, operator, value in selector.matchers:
        assert label in labels | TARGET_LABELS, f"{selector.name} has no label {label}"
        values = {series[label] for series in scraped.series[selector.name] if label in series}
        if label in labels and values:
            # Of alternatives, each: one that is misspelt is covered by the others otherwise.
            patterns = [re.escape(value)] if operator in ("=", "!=") else value.split("|")
            for pattern in patterns:
                assert any(re.fullmatch(pattern, one) for one in values), (
                    f"{label} is never {pattern}: {values}"
                )


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_labels_that_are_grouped_by_are_there(query: Query) -> None:
    known = catalog.everything()
    for below, labels in aggregations(parsed(query)):
        for selector in below:
            if selector.name in known:
                there = known[selector.name].labels_of(selector.name) | TARGET_LABELS
                assert set(labels) <= there, f"{selector.name} has no {set(labels) - there}"
