"""The loop with steps that are launched before those before them are complete: in which order things happen,
and that what goes wrong is told as if nothing were launched ahead. The model is a rule that the tests see.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import EngineLoop
from moebius_worker.engine.runner import Computed
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.serving import DEVICE_ERRORS
from moebius_worker.engine.types import SampleRow, Slice
from tests.waiting import PATIENCE
from tests.worker.engine.test_loop import CONFIG, EOS, TRIGGER, VOCAB, letters, request

# What a step says of the tokens that it computes.
Fault = Callable[[Sequence[int]], None]


def well(token_ids: Sequence[int]) -> None:
    pass


def fail(token_ids: Sequence[int]) -> None:
    if TRIGGER in token_ids:
        raise ArithmeticError("no such kernel")


def break_device(token_ids: Sequence[int]) -> None:
    if TRIGGER in token_ids:
        raise torch.AcceleratorError("an illegal memory access was encountered")


@dataclass
class Launched:
    device: "Device"
    name: str
    token_ids: list[int]
    drawn: list[int]

    def collect(self) -> list[int]:
        self.device.log.append(f"collect {self.name}")
        self.device.on_collect(self.token_ids)
        return self.drawn


@dataclass
class Device:
    """After token n comes n + 1, after 49 comes 0. `spoilt`: the logits after TRIGGER are not finite. The log
    has what is done, in order."""

    ahead: bool = True
    on_launch: Fault = well
    on_collect: Fault = well
    spoilt: bool = False
    log: list[str] = field(default_factory=list)
    launched: int = 0

    # ---- the runner ----

    def step(self, slices: Sequence[Slice], progress: Callable[[], None]) -> Computed:
        token_ids = [piece.token_ids[-1] for piece in slices if piece.sample]
        assert min(token_ids) >= 0
        self.log.append(f"step of {len(slices)}")
        self.on_launch(token_ids)
        self.on_collect(token_ids)
        logits = torch.zeros(len(token_ids), VOCAB)
        for row, token_id in zip(logits, self._next(token_ids), strict=True):
            row[token_id] = 1 if token_id >= 0 else torch.nan
        return Computed(logits, frozenset)

    # ---- what launches ----

    def offers(self, slices: Sequence[Slice]) -> bool:
        return self.ahead and all(len(piece.token_ids) == 1 for piece in slices)

    def launch(self, slices: Sequence[Slice], rows: Sequence[SampleRow], before: Launched | None) -> Launched:
        self.launched += 1
        name = str(self.launched)
        self.log.append(f"launch {name}")
        assert all(row.plain for row in rows)
        assert all((place < 0) == (before is not None) for piece in slices for place in piece.token_ids)
        places = [piece.token_ids[0] for piece in slices]
        token_ids = places if before is None else [before.drawn[~place] for place in places]
        # The noise of a draw belongs to its position.
        assert [row.position for row in rows] == [
            piece.start + 1 - len(row.prompt_ids) for piece, row in zip(slices, rows, strict=True)
        ]
        self.on_launch(token_ids)
        return Launched(self, name, token_ids, self._next(token_ids))

    def _next(self, token_ids: Sequence[int]) -> list[int]:
        return [-1 if self.spoilt and n in (TRIGGER, -1) else (n + 1) % VOCAB for n in token_ids]


class Engine:
    """The loop over a device, in this thread."""

    def __init__(self, device: Device, config: SchedulerConfig = CONFIG) -> None:
        self.device = device
        self.frames: list[engine_pb2.EngineFrame] = []
        self.incoming: list[engine_pb2.FrontFrame] = []
        self.woken = threading.Event()
        self.loop = EngineLoop(
            self,
            device,
            Scheduler(config),
            sample,
            Grammars(GrammarCompiler(letters, self.woken.set)),
            max_running=4,
            eos_token_ids=[EOS],
            faults=FaultInjector(()),
            device_errors=DEVICE_ERRORS,
            ahead=device,
        )

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        self.frames.append(frame)
        if frame.HasField("begin"):
            self.device.log.append(f"begin {sorted(frame.begin.handles)}")
        for delta in frame.end.deltas:
            self.device.log.append(f"send {list(delta.token_ids)} to {delta.handle}")

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]:
        raise NotImplementedError

    def submit(self, *requests: pb.Submit) -> None:
        self.incoming += [engine_pb2.FrontFrame(submit=one) for one in requests]

    def cancel(self, handle: int) -> None:
        self.incoming.append(engine_pb2.FrontFrame(cancel=pb.Cancel(handle=handle)))

    def turn(self) -> bool:
        incoming, self.incoming = self.incoming, []
        return self.loop.turn(incoming)

    def finish(self) -> None:
        for _ in range(500):
            if not self.turn():
                stats = self.loop.stats()
                assert (stats.running, stats.waiting, stats.kv_pages_used) == (0, 0, 0)
                return
        raise AssertionError("it does not end")

    def tokens(self, handle: int) -> list[int]:
        deltas = [delta for frame in self.frames for delta in frame.end.deltas if delta.handle == handle]
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def errors(self, handle: int) -> list[pb.Error]:
        failures = [failure for frame in self.frames for failure in frame.end.failures]
        return [failure.error for failure in failures if failure.handle == handle]


def of(**sampling: Any) -> pb.Sampling:
    return pb.Sampling(**({"top_p": 1, "repetition_penalty": 1} | sampling))


def test_a_step_is_launched_before_the_last_one_is_waited_for_and_that_is_told_before_the_next_one() -> None:
    engine = Engine(Device())
    engine.submit(request(1, [7, 8], max_tokens=5))
    engine.finish()
    assert engine.device.log == [
        "begin [1]",
        "step of 1",
        "send [9] to 1",
        "launch 1",
        "launch 2",
        "collect 1",
        "send [10] to 1",
        "launch 3",
        "collect 2",
        "send [11] to 1",
        "launch 4",
        "collect 3",
        "send [12] to 1",
        # Its length is known before.
        "collect 4",
        "send [13] to 1",
    ]
    assert engine.loop.stats().step == 5


def test_steps_are_counted_and_timed_once() -> None:
    engine = Engine(Device(on_collect=lambda _: time.sleep(0.005)))
    engine.submit(request(1, [7, 8], max_tokens=9), request(2, [9], max_tokens=5))
    start = time.monotonic()
    engine.finish()
    elapsed = time.monotonic() - start
    told = [frame.end.step for frame in engine.frames if frame.end.HasField("step")]
    assert [step.requests for step in told] == [2] * 5 + [1] * 4
    assert sum(step.tokens for step in told) == 3 + 2 * 4 + 4
    assert engine.loop.stats().step == len(told) == 9
    assert all(step.seconds >= 0.005 for step in told)
    assert sum(step.seconds for step in told) <= elapsed


def test_those_of_both_steps_are_announced_until_the_first_one_has_ended() -> None:
    engine = Engine(Device())
    engine.submit(request(1, [7, 8], max_tokens=6), request(2, [20, 21], max_tokens=3))
    engine.finish()
    log = engine.device.log
    assert log[0] == "begin [1, 2]"
    assert [line for line in log if line.startswith("begin")] == ["begin [1, 2]", "begin [1]"]
    assert (
        log.index("launch 3") < log.index("send [24] to 2") < log.index("begin [1]") < log.index("collect 3")
    )


def test_who_stops_is_computed_once_in_vain() -> None:
    engine = Engine(Device())
    engine.submit(request(1, [7], max_tokens=20, stop_token_ids=[12]), request(2, [7], max_tokens=8))
    engine.finish()
    assert engine.tokens(1) == [8, 9, 10, 11, 12]
    assert engine.tokens(2) == list(range(8, 16))
    told = [frame.end.step.requests for frame in engine.frames if frame.end.HasField("step")]
    assert told == [2] * 6 + [1] * 2, "5 tokens, and once in vain"
    # Alone, too: nothing is told of the step after its last.
    engine.submit(request(3, [7, 8], max_tokens=20, stop_token_ids=[12]))
    engine.finish()
    assert engine.tokens(3) == [9, 10, 11, 12]


def test_a_new_request_waits_for_one_step_more_at_most() -> None:
    engine = Engine(Device())
    engine.submit(request(1, [7], max_tokens=40))
    for _ in range(10):
        engine.turn()
    engine.submit(request(2, [20, 21], max_tokens=3))
    engine.turn()
    assert engine.tokens(2) == [], "one was launched before it came"
    engine.turn()
    assert engine.tokens(2) == [22]
    engine.cancel(1)
    said = len(engine.tokens(1))
    engine.finish()
    assert len(engine.tokens(1)) == said, "not even what was launched before"
    assert engine.tokens(2) == [22, 23, 24]


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": of(repetition_penalty=1.1)},
        {"sampling": of(presence_penalty=0.5)},
        {"sampling": of(frequency_penalty=0.5)},
        {"sampling": of(logit_bias={3: 1.0})},
        {"sampling": of(logprobs=0)},
        {"min_tokens": 8, "stop_token_ids": [2]},
        {"quarantined": True},
        {"grammar": pb.Grammar(text=json.dumps({"grammars": [{"lark_grammar": "start: /[A-Z]+/"}]}))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_runs_ahead_of_what_the_host_has_a_part_in(fields: dict[str, Any]) -> None:
    engine = Engine(Device())
    engine.submit(request(1, [7], max_tokens=8, **fields))
    while not engine.tokens(1):
        assert not engine.errors(1)
        # A grammar is compiled elsewhere.
        if not engine.turn():
            assert engine.woken.wait(PATIENCE)
    engine.submit(request(2, [7], max_tokens=20))
    while len(engine.tokens(1)) < 8:
        engine.turn()
    log = [line.split()[0] for line in engine.device.log if not line.startswith("send")]
    assert ("launch", "launch") not in set(pairwise(log))
    engine.finish()
    log = [line.split()[0] for line in engine.device.log if not line.startswith("send")]
    assert ("launch", "launch") in set(pairwise(log)), "when it is over"


def test_nothing_runs_ahead_of_a_prefill_that_gets_a_token_at_a_time() -> None:
    """To a kernel it is a decode, but nothing is sampled."""
    engine = Engine(Device(), replace(CONFIG, max_step_tokens=2))
    engine.submit(request(1, [7], max_tokens=20), request(2, [20, 21, 22, 23, 24], max_tokens=9))
    engine.finish()
    assert engine.tokens(1) == list(range(8, 28))
    assert engine.tokens(2) == list(range(25, 34))


def test_past_min_tokens_steps_are_launched() -> None:
    engine = Engine(Device())
    engine.submit(request(1, [7], max_tokens=20, min_tokens=5, stop_token_ids=[9, 16]))
    engine.finish()
    assert engine.tokens(1)[:2] == [8, 0], "9 was banned"
    assert engine.tokens(1)[2:] == [1, 2, 3, 4, 5, 6, 7, 8, 9], "and is not any more"
    assert engine.device.launched == 7


FAULTS = {
    "the launch raises": {"on_launch": fail},
    "the device raises": {"on_collect": fail},
    "not finite": {"spoilt": True},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("first", [TRIGGER, TRIGGER - 1, TRIGGER - 2, TRIGGER - 5])
def test_what_goes_wrong_is_told_as_if_nothing_were_launched_ahead(fault: dict[str, Any], first: int) -> None:
    engines = []
    for ahead in (False, True):
        engine = Engine(Device(ahead=ahead, **fault))
        # The second one meets the trigger after some steps; the third one has ended by then, or not.
        engine.submit(
            request(1, [1, 2], max_tokens=12),
            request(2, [first], max_tokens=12),
            request(3, [1], max_tokens=4),
        )
        engine.finish()
        engine.submit(request(4, [3, 4], max_tokens=6))
        engine.finish()
        engines.append(engine)
    plain, ahead_of_it = engines
    for handle in (1, 2, 3, 4):
        assert plain.tokens(handle) == ahead_of_it.tokens(handle)
        assert plain.errors(handle) == ahead_of_it.errors(handle)
    assert len(plain.errors(2)) == 1
    assert plain.tokens(4) == [5, 6, 7, 8, 9, 10]
    assert plain.loop._raises == ahead_of_it.loop._raises == 0


@pytest.mark.parametrize("fault", ["on_launch", "on_collect"])
def test_an_error_of_the_device_ends_the_engine_and_accuses_those_of_both_steps(fault: str) -> None:
    engine = Engine(Device(**{fault: break_device}))
    engine.submit(request(1, [1, 2], max_tokens=9), request(2, [TRIGGER - 4], max_tokens=9))
    with pytest.raises(EngineDownError) as caught:
        engine.finish()
    assert caught.value.reason == pb.REASON_GPU_FAULT
    assert [line for line in engine.device.log if line.startswith("begin")] == ["begin [1, 2]"]
    assert engine.tokens(2) == [TRIGGER - 3, TRIGGER - 2, TRIGGER - 1, TRIGGER]


def test_a_step_that_raises_and_the_one_launched_after_it_count_once() -> None:
    def fail_from_there(token_ids: Sequence[int]) -> None:
        if any(TRIGGER <= token_id < TRIGGER + 3 for token_id in token_ids):
            raise ArithmeticError("no such kernel")

    engine = Engine(Device(on_collect=fail_from_there))
    engine.submit(request(1, [TRIGGER - 3], max_tokens=20))
    engine.finish()
    assert engine.loop._raises == 1
    assert len(engine.errors(1)) == 1
    assert engine.tokens(1) == [TRIGGER - 2, TRIGGER - 1, TRIGGER]


def test_who_has_ended_is_not_failed_by_what_was_computed_in_vain() -> None:
    engine = Engine(Device(spoilt=True))
    engine.submit(request(1, [TRIGGER - 3], max_tokens=20, stop_token_ids=[TRIGGER]))
    engine.submit(request(2, [TRIGGER - 3], max_tokens=3, min_tokens=0))
    engine.finish()
    assert engine.tokens(1) == engine.tokens(2) == [TRIGGER - 2, TRIGGER - 1, TRIGGER]
    assert engine.errors(1) == engine.errors(2) == []
