"""What every service tells Prometheus of itself."""

import platform
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics


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
