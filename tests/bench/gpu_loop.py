"""Decoding through the engine's whole loop on a GPU, one step after another and with steps launched ahead,
beside what their graphs alone take. Random weights, draws at temperature 1.

    PYTHONPATH=kernels:services:proto:. python tests/bench/gpu_loop.py qwen3-30b:nvfp4
"""

import argparse
import statistics
import time
from functools import partial

from moebius_kernels.operations import Draw
from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.loop import EngineLoop
from moebius_worker.engine.run_ahead import RunAhead
from moebius_worker.engine.runner import ModelRunner
from moebius_worker.engine.sampler import choose, sample
from moebius_worker.engine.scheduler import Scheduler, SchedulerConfig
from moebius_worker.framing import encode
from tests.bench.gpu_engine import MODELS, PROMPT, STREAMS, load, replays, unproven

WARM, TIMED = 24, 160


class NoFront:
    """Frames are made ready to be sent, and those of tokens are kept."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        encode(frame)
        for delta in frame.end.deltas:
            self.tokens.setdefault(delta.handle, []).extend(delta.token_ids)

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]:
        raise NotImplementedError


def submit(handle: int, vocab_size: int) -> engine_pb2.FrontFrame:
    return engine_pb2.FrontFrame(
        submit=worker_pb2.Submit(
            handle=handle,
            request_id=str(handle),
            token_ids=[(handle * 7919 + at * 104729) % vocab_size for at in range(PROMPT)],
            max_tokens=WARM + TIMED + 1,
            sampling=worker_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, seed=handle),
        )
    )


def decode(
    runner: ModelRunner, draw_tokens: Draw, streams: int, *, ahead: bool
) -> tuple[float, dict[int, list[int]]]:
    """Median seconds of a turn in which all decode, and what they said."""
    front = NoFront()
    config = SchedulerConfig(runner.layout, streams, runner.max_step_tokens, runner.max_model_len, streams)
    loop = EngineLoop(
        front,
        runner,
        Scheduler(config),
        partial(sample, draw_tokens=draw_tokens),
        Grammars(GrammarCompiler(lambda: None, lambda: None)),  # type: ignore[arg-type, return-value]
        max_running=streams,
        eos_token_ids=[],
        faults=FaultInjector(()),
        ahead=RunAhead(runner, runner.captured, partial(choose, draw_tokens=draw_tokens)) if ahead else None,
    )
    loop.turn([submit(handle, runner.vocab_size) for handle in range(streams)])
    while (
        min((len(tokens) for tokens in front.tokens.values()), default=0) < WARM
        or len(front.tokens) < streams
    ):
        loop.turn(())
    times = []
    for _ in range(TIMED // 2):
        start = time.perf_counter()
        loop.turn(())
        times.append(time.perf_counter() - start)
    while loop.turn(()):
        pass
    return statistics.median(times), front.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["qwen3-30b:nvfp4"], help="model:form")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    arguments = parser.parse_args()
    operations = unproven("triton")
    for case in arguments.cases:
        name, _, form = case.partition(":")
        runner = load(MODELS[name], form, arguments.layers)
        runner.bind(operations)
        runner.capture(lambda size: size in STREAMS, lambda *_: None)
        for streams in STREAMS:
            run = partial(decode, runner, operations.draw_tokens, streams)
            run(ahead=False)
            (plain, said), (ahead, same) = (run(ahead=way) for way in (False, True))
            device = replays(runner, streams)
            print(
                f"{case} {streams:>4} streams: {plain * 1e3:>7.3f} ms a step, {ahead * 1e3:>7.3f} ahead, "
                f"{device * 1e3:>7.3f} its graph; {streams / ahead:>7.0f} tok/s, {plain / ahead - 1:+.1%}",
                flush=True,
            )
            assert said == same, "the tokens differ"
        del runner


if __name__ == "__main__":
    main()
