"""The loop with the real scheduler, sampler and pipe; the model is a rule that the tests can see through."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models

from moebius_kernels.launch import Geometry, LatchedError, LaunchError
from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine import loop as loop_module
from moebius_worker.engine import sampler
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import MAX_RAISES, EngineLoop
from moebius_worker.engine.pipe import FrontGoneError, Pipe
from moebius_worker.engine.runner import Computed
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.serving import DEVICE_ERRORS
from moebius_worker.engine.types import Request, Slice
from moebius_worker.framing import FrameReader, encode
from tests.waiting import PATIENCE

VOCAB = 50
# A gateway gives a request up after so many.
GATEWAY_STRIKES = 3
# A prompt that ends with this makes the step do what the test says.
TRIGGER = 40
# A slice that holds this is faulty, whatever its logits are.
FAULTY = 41
EOS = 39
GEOMETRY = Geometry((1, 1, 1), (32, 1, 1))
CONFIG = SchedulerConfig(
    CacheLayout(page_size=4, num_pages=16),
    max_running=4,
    max_step_tokens=16,
    max_model_len=128,
    max_waiting=4,
)


@dataclass
class SuccessorRunner:
    """After token n comes n + 1 (mod 40). `on_trigger` may change the logits of a row, or raise."""

    on_trigger: Callable[[torch.Tensor], None] = lambda row: None
    seconds: float = 0.0
    layers: int = 1
    steps: list[tuple[int, ...]] = field(default_factory=list)

    def step(self, slices: Sequence[Slice], progress: Callable[[], None]) -> Computed:
        for _ in range(self.layers):
            time.sleep(self.seconds)
            progress()
        self.steps.append(tuple(piece.handle for piece in slices))
        rows = [piece for piece in slices if piece.sample]
        logits = torch.zeros(len(rows), VOCAB)
        for row, piece in zip(logits, rows, strict=True):
            row[(piece.token_ids[-1] + 1) % TRIGGER] = 1
            if piece.token_ids[-1] == TRIGGER:
                self.on_trigger(row)
        faulty = frozenset(piece.handle for piece in slices if FAULTY in piece.token_ids)
        return Computed(logits, lambda: faulty)


def request(handle: int, token_ids: Sequence[int], **fields: Any) -> pb.Submit:
    """Greedy, 4 tokens, unless told otherwise."""
    sampling = pb.Sampling(top_p=1, repetition_penalty=1)
    defaults = {"max_tokens": 4, "sampling": sampling, "request_id": f"request-{handle}"}
    return pb.Submit(handle=handle, token_ids=token_ids, **(defaults | fields))


@dataclass
class Bench:
    """The front's end of the pipe, and the loop in a thread."""

    runner: SuccessorRunner
    front: socket.socket
    thread: threading.Thread
    ended: list[Exception]
    reader: FrameReader = field(default_factory=FrameReader)
    frames: list[engine_pb2.EngineFrame] = field(default_factory=list)

    def submit(self, *requests: pb.Submit) -> None:
        """They arrive together."""
        frames = [engine_pb2.FrontFrame(submit=request) for request in requests]
        self.front.sendall(b"".join(map(encode, frames)))

    def cancel(self, handle: int) -> None:
        self.front.sendall(encode(engine_pb2.FrontFrame(cancel=pb.Cancel(handle=handle))))

    def read_until(self, condition: Callable[["Bench"], object]) -> None:
        """Reads frames, until the condition holds."""
        self.front.settimeout(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while not condition(self):
            assert time.monotonic() < deadline, f"not within {PATIENCE} s"
            data = self.front.recv(65536)
            assert data, "the loop ended"
            self.frames += [engine_pb2.EngineFrame.FromString(payload) for payload in self.reader.feed(data)]

    def ends(self) -> list[engine_pb2.StepEnd]:
        return [frame.end for frame in self.frames if frame.HasField("end")]

    def begins(self) -> list[list[int]]:
        return [list(frame.begin.handles) for frame in self.frames if frame.HasField("begin")]

    def tokens(self, handle: int) -> list[int]:
        deltas = [delta for end in self.ends() for delta in end.deltas if delta.handle == handle]
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def error(self, handle: int) -> pb.Error | None:
        errors = [
            failure.error for end in self.ends() for failure in end.failures if failure.handle == handle
        ]
        return errors[0] if errors else None

    def finished(self, handle: int) -> bool:
        return any(d.finish_reason for end in self.ends() for d in end.deltas if d.handle == handle)

    def outcome(self) -> Exception:
        self.thread.join(PATIENCE)
        assert self.ended, "the loop goes on"
        return self.ended[0]


def letters() -> LLTokenizer:
    """Token n spells the letter n, from A on."""
    vocabulary = [chr(ord("A") + token_id) for token_id in range(VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(vocabulary)}, unk_token="A"))
    # Grammars need to know.
    tokenizer.decoder = decoders.ByteLevel()
    return LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB, eos_token=[EOS])


@pytest.fixture
def bench() -> Iterator[Bench]:
    ours, theirs = socket.socketpair()
    runner, ended = SuccessorRunner(), list[Exception]()
    pipe = Pipe(ours)
    loop = EngineLoop(
        pipe,
        runner,
        Scheduler(CONFIG),
        sample,
        Grammars(GrammarCompiler(letters, pipe.wake)),
        max_running=4,
        eos_token_ids=[EOS],
        faults=FaultInjector(()),
        device_errors=DEVICE_ERRORS,
    )

    def run() -> None:
        try:
            loop.run()
        except (FrontGoneError, EngineDownError) as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield Bench(runner, theirs, thread, ended)
    theirs.close()
    thread.join(PATIENCE)
    ours.close()
    assert ended, "the loop ends with its front"


def fail(row: torch.Tensor) -> None:
    raise ArithmeticError("no such kernel")


def test_each_step_ends_with_a_frame_and_begins_with_one_when_the_requests_change(bench: Bench) -> None:
    bench.submit(request(1, [7], max_tokens=3))
    bench.read_until(lambda b: b.finished(1))
    assert bench.tokens(1) == [8, 9, 10]
    assert bench.begins() == [[1]]
    kinds = [frame.WhichOneof("frame") for frame in bench.frames]
    assert kinds[:4] == ["begin", "end", "end", "end"], "the accused are named before the step"
    last = [end for end in bench.ends() if end.deltas][-1]
    assert (last.stats.step, last.stats.running, last.stats.kv_pages_used) == (3, 0, 0)
    assert (last.stats.prompt_tokens, last.stats.generated_tokens) == (1, 3)


def test_a_long_prefill_is_progress_and_brings_nothing(bench: Bench) -> None:
    bench.submit(request(1, [3] * 40, max_tokens=1))
    bench.read_until(lambda b: b.finished(1))
    assert [len(end.deltas) for end in bench.ends()][:3] == [0, 0, 1], "chunks of 16 tokens"


def test_what_each_step_computed_is_told_when_it_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "HEARTBEAT_SECONDS", 0.02)
    bench.runner.seconds, bench.runner.layers = 0.01, 5
    start = time.monotonic()
    bench.submit(request(1, [3] * 20, max_tokens=2), request(2, [7], max_tokens=2))
    bench.read_until(lambda b: b.finished(1) and b.finished(2))
    elapsed = time.monotonic() - start
    told = [end.step for end in bench.ends() if end.HasField("step")]
    assert len(told) < len(bench.ends()), "heartbeats within a step tell of none"
    assert len(told) == len(bench.runner.steps)
    assert [step.requests for step in told] == [len(handles) for handles in bench.runner.steps]
    # Both prompts, and what is decoded after each one's first token.
    assert sum(step.tokens for step in told) == 21 + 2
    assert all(step.seconds >= 0.05 for step in told)
    assert sum(step.seconds for step in told) <= elapsed


def test_a_long_step_is_progress_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "HEARTBEAT_SECONDS", 0.05)
    bench.runner.seconds, bench.runner.layers = 0.01, 40
    start = time.monotonic()
    bench.submit(request(1, [7], max_tokens=1))
    bench.read_until(lambda b: b.finished(1))
    elapsed = time.monotonic() - start
    kinds = [frame.WhichOneof("frame") for frame in bench.frames]
    within = bench.frames[kinds.index("begin") + 1 :]
    last = next(index for index, frame in enumerate(within) if frame.end.deltas)
    assert 2 <= last <= elapsed / 0.05 + 1, "now and then, and not after each layer"
    assert all(frame.HasField("end") and not frame.end.failures for frame in within[:last])


def test_an_idle_engine_says_so_every_second(bench: Bench) -> None:
    bench.read_until(lambda b: len(b.ends()) >= 2)
    assert bench.ends()[-1].stats.max_running == 4
    assert bench.runner.steps == []


def test_cancel_frees_at_once(bench: Bench) -> None:
    bench.runner.seconds = 0.02
    bench.submit(request(1, [7], max_tokens=50))
    bench.read_until(lambda b: len(b.tokens(1)) >= 2)
    bench.cancel(1)
    bench.read_until(lambda b: b.ends()[-1].stats.running == 0)
    assert bench.ends()[-1].stats.kv_pages_used == 0
    assert not bench.finished(1)


def test_what_the_scheduler_refuses_is_told(bench: Bench) -> None:
    bench.submit(request(1, [3] * 100))
    bench.read_until(lambda b: b.error(1))
    error = bench.error(1)
    assert error is not None
    assert (error.reason, error.retryable, error.in_step) == (pb.REASON_KV_EXHAUSTED, False, False)


def test_who_waited_beyond_its_deadline_is_told_that_it_may_come_again(bench: Bench) -> None:
    urgent = [request(handle, [3, 4], max_tokens=12) for handle in range(1, 41)]
    bench.submit(*urgent, request(41, [3, 4], priority=5, deadline_ms=1))
    bench.read_until(lambda b: b.error(41))
    error = bench.error(41)
    assert error is not None
    assert (error.reason, error.retryable, error.in_step) == (pb.REASON_OVERLOADED, True, False)


def test_a_step_that_raises_fails_what_was_in_it(bench: Bench) -> None:
    bench.runner.on_trigger = fail
    bench.submit(request(1, [TRIGGER]))
    bench.read_until(lambda b: b.error(1))
    error = bench.error(1)
    assert error is not None
    assert (error.reason, error.retryable, error.in_step) == (pb.REASON_ENGINE_DEAD, True, True)
    assert "ArithmeticError: no such kernel" in error.message
    bench.submit(request(2, [7]))
    bench.read_until(lambda b: b.finished(2))
    assert bench.tokens(2) == [8, 9, 10, 11]


def test_so_many_raises_in_a_row_end_the_engine(bench: Bench) -> None:
    bench.runner.on_trigger = fail
    for handle in range(1, MAX_RAISES):
        bench.submit(request(handle, [TRIGGER], request_id="chosen by the client"))
        bench.read_until(lambda b: b.error(handle))  # noqa: B023
    # A step that works in between: the count starts anew.
    bench.submit(request(10, [7], max_tokens=1))
    bench.read_until(lambda b: b.finished(10))
    for handle in range(11, 11 + MAX_RAISES):
        assert bench.ended == []
        bench.submit(request(handle, [TRIGGER], request_id="chosen by the client"))
        if handle < 10 + MAX_RAISES:
            bench.read_until(lambda b: b.error(handle))  # noqa: B023
    outcome = bench.outcome()
    assert isinstance(outcome, EngineDownError)
    assert outcome.reason == pb.REASON_ENGINE_DEAD
    assert "no such kernel" in str(outcome)


def test_a_request_that_raises_again_and_again_does_not_end_the_engine(bench: Bench) -> None:
    """Its gateway submits it anew until it is known as poison: the others must not lose their engine."""
    bench.runner.on_trigger = fail
    for handle in range(1, 1 + GATEWAY_STRIKES):
        bench.submit(request(handle, [TRIGGER]))
        bench.read_until(lambda b: b.error(handle))  # noqa: B023
    bench.submit(request(10, [7]))
    bench.read_until(lambda b: b.finished(10))


def test_a_request_that_cannot_even_be_taken_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Scheduler.add

    def stumble(self: Scheduler, request: Request) -> None:
        if TRIGGER in request.token_ids:
            raise ArithmeticError("no such page")
        add(self, request)

    monkeypatch.setattr(Scheduler, "add", stumble)
    bench.submit(request(1, [TRIGGER]), request(2, [7]))
    bench.read_until(lambda b: b.error(1) and b.finished(2))
    error = bench.error(1)
    assert error is not None
    assert (error.reason, error.retryable, error.in_step) == (pb.REASON_ENGINE_DEAD, True, True)
    assert "ArithmeticError: no such page" in error.message


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("an illegal memory access was encountered"),
        LatchedError("_norm", "triton", GEOMETRY, (), "CUDA error 700: an illegal memory access"),
        LaunchError("_norm", "triton", GEOMETRY, (), "grid.x is 0, allowed are 1 to 2147483647"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_device_ends_the_engine_at_once(error: Exception, bench: Bench) -> None:
    """However it is found: no request is to blame, and no other to be computed."""

    def fault(row: torch.Tensor) -> None:
        raise error

    bench.runner.on_trigger = fault
    bench.submit(request(1, [TRIGGER]))
    outcome = bench.outcome()
    assert isinstance(outcome, EngineDownError)
    assert outcome.reason == pb.REASON_GPU_FAULT


def test_logits_that_are_not_finite_fail_their_request_alone(bench: Bench) -> None:
    def spoil(row: torch.Tensor) -> None:
        row.fill_(float("nan"))

    bench.runner.on_trigger = spoil
    bench.submit(request(1, [7], max_tokens=40), request(2, [TRIGGER]))
    bench.read_until(lambda b: b.error(2) and b.finished(1))
    error = bench.error(2)
    assert error is not None
    assert error.in_step
    assert "not finite" in error.message
    assert any(set(handles) == {1, 2} for handles in bench.runner.steps), "they shared a step"
    assert bench.tokens(1) == [n % TRIGGER for n in range(8, 48)]
    assert bench.ends()[-1].stats.kv_pages_used == 0


@pytest.mark.parametrize(
    "prompt",
    [[FAULTY] + [3] * 5, [FAULTY] + [3] * 39],
    ids=["early row", "early chunk, which samples nothing"],
)
def test_a_fault_in_any_row_fails_its_request_though_its_logits_are_finite(
    bench: Bench, prompt: list[int]
) -> None:
    bench.submit(request(1, [7], max_tokens=40), request(2, prompt))
    bench.read_until(lambda b: b.error(2) and b.finished(1))
    error = bench.error(2)
    assert error is not None
    assert (error.reason, error.retryable, error.in_step) == (pb.REASON_ENGINE_DEAD, True, True)
    assert "not finite" in error.message
    assert [set(handles) for handles in bench.runner.steps if 2 in handles] == [{1, 2}], (
        "the first step ends it"
    )
    assert bench.tokens(1) == [n % TRIGGER for n in range(8, 48)]
    assert bench.tokens(2) == []
    # Nothing of it is kept for the next request with this prompt.
    bench.submit(request(3, [*prompt, 5], max_tokens=1))
    bench.read_until(lambda b: b.error(3))
    assert bench.ends()[-1].stats.cached_tokens == 0


def test_a_request_that_fails_in_two_ways_is_told_the_first_cause_once(bench: Bench) -> None:
    """Its draw fails too, which comes before the loop knows that it was faulty."""
    bench.runner.on_trigger = lambda row: row.fill_(float("nan"))
    bench.submit(request(1, [7], max_tokens=40), request(2, [FAULTY, TRIGGER]), request(3, [5, TRIGGER]))
    bench.read_until(lambda b: b.error(2) and b.error(3) and b.finished(1))
    failures = {failure.handle: failure for end in bench.ends() for failure in end.failures}
    assert sum(len(end.failures) for end in bench.ends()) == 2
    assert "hidden states" in failures[2].error.message
    assert "hidden states" not in failures[3].error.message
    assert bench.tokens(1) == [n % TRIGGER for n in range(8, 48)]


def test_the_draw_is_asked_for_before_the_loop_waits_for_faults(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has nothing to do while the loop has waited for the one and not yet asked for the other."""
    order: list[str] = []
    step, choose = bench.runner.step, sampler.choose

    def told_step(slices: Sequence[Slice], progress: Callable[[], None]) -> Computed:
        logits, find_faulty = step(slices, progress)
        return Computed(logits, lambda: (order.append("wait"), find_faulty())[1])

    def told_choose(*args: Any, **options: Any) -> torch.Tensor:
        order.append("draw")
        return choose(*args, **options)

    monkeypatch.setattr(bench.runner, "step", told_step)
    monkeypatch.setattr(sampler, "choose", told_choose)
    bench.submit(request(1, [7], max_tokens=2))
    bench.read_until(lambda b: b.finished(1))
    assert order == ["draw", "wait"] * 2


def test_no_stop_token_before_min_tokens(bench: Bench) -> None:
    bench.submit(request(1, [7], stop_token_ids=[9], max_tokens=10))
    bench.submit(request(2, [7], stop_token_ids=[9], max_tokens=10, min_tokens=3))
    # The resumed ones count.
    bench.submit(request(3, [7, 8], resumed=1, stop_token_ids=[9], max_tokens=10, min_tokens=1))
    bench.read_until(lambda b: all(b.finished(handle) for handle in (1, 2, 3)))
    assert bench.tokens(1) == [8, 9]
    assert bench.tokens(2)[:2] == [8, 0], "9 was banned, and of the others the first is the best"
    assert bench.tokens(3) == [9]


def test_logprobs_come_when_asked_for(bench: Bench) -> None:
    sampling = pb.Sampling(top_p=1, repetition_penalty=1, logprobs=2)
    bench.submit(request(1, [7], max_tokens=2, sampling=sampling))
    bench.read_until(lambda b: b.finished(1))
    logprobs = [logprob for end in bench.ends() for delta in end.deltas for logprob in delta.logprobs]
    assert [logprob.top_token_ids[0] for logprob in logprobs] == [8, 9]
    assert all(logprob.logprob == logprob.top_logprobs[0] < 0 for logprob in logprobs)


def test_a_front_that_is_gone_ends_it(bench: Bench) -> None:
    bench.submit(request(1, [7], max_tokens=50))
    bench.front.close()
    assert isinstance(bench.outcome(), FrontGoneError)
