"""How long an engine waits for each of its operations, and when it does not."""

import pytest
import torch

from moebius_worker.engine import probation as probation_module
from moebius_worker.engine.probation import Probation


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(probation_module.time, "monotonic", lambda: self.now)


def test_it_waits_from_the_start_and_for_some_time_of_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = Clock(monkeypatch), list[float]()
    probation = Probation(60, lambda: waits.append(clock.now))
    clock.now += 500
    assert probation.wait(), "loading takes as long as it takes"
    probation.serve()
    # The front, which heard of it later, counts no longer than this.
    clock.now += 65
    assert probation.lasts()
    assert probation.wait()
    clock.now += 10
    assert not probation.wait()
    assert not probation.lasts()
    assert waits == [1500, 1565]


def test_what_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        Probation(60, fault).wait()


@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_is_not_waited_for(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    assert Probation(60).wait()
    assert len(waits) == (not capturing)
