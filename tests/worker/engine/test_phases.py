"""Seconds by phase, and the GPU that is woken meanwhile."""

import ctypes
from typing import Any

import pytest

from moebius_worker.engine import gpu_context
from moebius_worker.engine.phases import Phases


def test_phases_are_timed_in_their_order_and_short_ones_together() -> None:
    now = 100.0
    phases = Phases(lambda: now)
    for phase, spent in (
        ("opening the checkpoint", 0.04),
        ("starting PyTorch", 5.0),
        ("preflight: linear:triton, 1 tokens", 0.25),
        ("preflight: linear:reference, 1 tokens", 0.05),
        ("preflight: linear:triton, 2 tokens", 0.5),
        ("loading weights", 2.0),
        ("loading weights", 1.0),
    ):
        phases.begin(phase)
        now += spent
    found = phases.seconds()
    assert found == {
        "starting PyTorch": 5.0,
        "preflight: linear:triton": 0.75,
        "loading weights": 3.0,
        "rest": 0.09,
    }
    assert list(found)[:2] == ["starting PyTorch", "preflight: linear:triton"]
    # Whoever asks later hears the same.
    now += 10
    assert phases.seconds() == found


class Driver:
    """`fails`: the call that does not succeed."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments[-1]))
            if name == "cuDeviceGet":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = 40 + arguments[1]
            return 100 if name == self.fails else 0

        return call


def test_the_context_is_that_of_the_device_that_was_asked_for() -> None:
    driver: Any = Driver()
    gpu_context._make_context(driver, 3)
    assert [name for name, _ in driver.calls] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert driver.calls[1][1] == 3
    assert driver.calls[2][1].value == 43


def test_without_a_gpu_nothing_more_is_asked() -> None:
    driver: Any = Driver(fails="cuInit")
    gpu_context._make_context(driver, 0)
    assert len(driver.calls) == 1


@pytest.mark.parametrize(
    ("device", "number"),
    # The last is for PyTorch to refuse.
    [("cuda", 0), ("auto", 0), ("cuda:2", 2), ("cpu", None), ("cuda:x", None)],
)
def test_what_the_settings_name_is_woken(device: str, number: int | None, monkeypatch) -> None:
    woken: list[int] = []

    class Thread:
        def __init__(self, target: Any, args: tuple[Any, int], daemon: bool) -> None:
            woken.append(args[1])

        def start(self) -> None:
            pass

    monkeypatch.setattr(gpu_context.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(gpu_context.threading, "Thread", Thread)
    gpu_context.wake_gpu(device)
    assert woken == ([] if number is None else [number])


def test_where_there_is_no_driver_nothing_happens() -> None:
    gpu_context.wake_gpu("auto")
