"""What every service tells Prometheus of itself, and how."""

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

# As wsgiref calls it, with the environment and the function that begins an answer.
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def tell_build(service: str, registry: CollectorRegistry) -> None:
    """Registers `moebius_<service>_build_info`, and memory and CPU time of the process."""
    # They double the number of series, and nobody reads them.
    disable_created_metrics()
    ProcessCollector(registry=registry)
    info = Gauge(
        f"moebius_{service}_build_info",
        "Always 1; the labels tell what runs",
        ["version", "python"],
        registry=registry,
    )
    info.labels(version("moebius"), platform.python_version()).set(1)


def metrics_app(registry: CollectorRegistry) -> App:
    """Answers scrapes, always in the plain format.

    In OpenMetrics, for which Prometheus 2 asks first, the library writes `vllm_` for `vllm:`.
    """

    def answer(_: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
        return [generate_latest(registry)]

    return answer
