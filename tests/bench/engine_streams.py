"""Streams that decode in the engine's own loop, as a worker's do: scheduled, drawn at temperature 1, their
frames made ready to be sent, and the next step launched while one is computed where there are CUDA graphs."""

from functools import partial

from moebius_kernels.operations import Draw
from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import EngineLoop
from moebius_worker.engine.run_ahead import RunAhead
from moebius_worker.engine.runner import ModelRunner
from moebius_worker.engine.sampler import choose, sample
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.framing import encode


class _NoFront:
    """Counts tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        encode(frame)
        assert not frame.end.failures, frame.end.failures
        for delta in frame.end.deltas:
            self.tokens[delta.handle] = self.tokens.get(delta.handle, 0) + len(delta.token_ids)

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]:
        raise NotImplementedError


class DecodingStreams:
    """`count` requests, each with `warm` tokens behind its prompt."""

    def __init__(
        self, runner: ModelRunner, draw_tokens: Draw, count: int, *, prompt: int, warm: int, output: int
    ) -> None:
        """`prompt` and `output`: tokens of each; more than `output` are not said."""
        self._front = _NoFront()
        config = SchedulerConfig(runner.layout, count, runner.max_step_tokens, runner.max_model_len, count)
        self._loop = EngineLoop(
            self._front,
            runner,
            Scheduler(config),
            partial(sample, draw_tokens=draw_tokens),
            Grammars(GrammarCompiler(lambda: None, lambda: None)),  # type: ignore[arg-type, return-value]
            max_running=count,
            eos_token_ids=[],
            faults=FaultInjector(()),
            expert_use=runner.expert_use,
            ahead=RunAhead(runner, runner.captured, partial(choose, draw_tokens=draw_tokens)),
        )
        vocab = runner.vocab_size
        self._loop.turn([_submit(handle, vocab, prompt, output) for handle in range(count)])
        while len(self._front.tokens) < count or min(self._front.tokens.values()) < warm:
            self.turn()

    @property
    def said(self) -> int:
        """Tokens of all of them so far."""
        return sum(self._front.tokens.values())

    def turn(self) -> None:
        """The tokens of a step; where steps are launched ahead, the next one is on its way."""
        assert self._loop.turn(()), "all has been said"


def _submit(handle: int, vocab: int, prompt: int, output: int) -> engine_pb2.FrontFrame:
    return engine_pb2.FrontFrame(
        submit=worker_pb2.Submit(
            handle=handle,
            request_id=str(handle),
            # No two begin alike.
            token_ids=[(handle * 7919 + at * 104729) % vocab for at in range(prompt)],
            max_tokens=output,
            sampling=worker_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, seed=handle),
        )
    )
