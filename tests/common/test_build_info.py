"""What every service tells of itself."""

from prometheus_client import CollectorRegistry, Counter

from moebius_common.build_info import tell_build


def test_build_and_process_are_told_and_no_times_of_creation() -> None:
    registry = CollectorRegistry()
    tell_build("worker", registry)
    Counter("x", "X", registry=registry).inc()
    families = {family.name: family for family in registry.collect()}
    [build] = families["moebius_worker_build_info"].samples
    assert build.value == 1
    assert set(build.labels) == {"version", "python"}
    assert "process_resident_memory_bytes" in families
    assert not [sample.name for sample in families["x"].samples if sample.name.endswith("_created")]
