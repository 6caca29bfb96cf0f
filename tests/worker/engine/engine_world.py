"""The engine whole, in this thread: its loop, scheduler, caches, sampler, and a tiny model that computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.operations import REFERENCE, Draw
from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.cache.layout import CacheLayout, window_reach
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import EngineLoop
from moebius_worker.engine.memory import Demand, MemoryPlan
from moebius_worker.engine.run_ahead import RunAhead
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.sampler import choose, sample
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Slice
from tests.worker.engine.models.harness import write_random
from tests.worker.engine.models.qwen_world import EXPERTS, SCALES
from tests.worker.engine.models.qwen_world import SIZES as QWEN_SIZES

VOCAB = 384
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "num_local_experts": 6}
# By the kinds of what their layers keep.
MODELS = {
    "full": lambda: (Qwen3MoeForCausalLM(Qwen3MoeConfig(**(COMMON | FEW))), {}),
    "window": lambda: (GptOssForCausalLM(GptOssConfig(**(COMMON | HALF))), {}),
    "states": lambda: (
        Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(QWEN_SIZES | EXPERTS | {"eos_token_id": None}))),
        SCALES,
    ),
}


def write_model(path: Path, kind: str) -> Path:
    model, scales = MODELS[kind]()
    return write_random(path, model, scales=scales)


def load(path: Path, **options: Any) -> ModelRunner:
    options = {"device": "cpu", "kv_cache_bytes": 1 << 20, "page_size": 4, "max_running": 4} | options
    return ModelRunner.load(open_checkpoint(str(path)), RunnerOptions(**options))


def with_pools(runner: ModelRunner, tokens: int, max_model_len: int) -> ModelRunner:
    """The same model with caches that hold `tokens` tokens, and windows and states for few requests."""
    page_size, window = runner.layout.page_size, runner.layout.window
    layout = CacheLayout(
        page_size=page_size,
        num_pages=-(-tokens // page_size),
        window=window,
        num_window_pages=0 if window is None else 9 * window_reach(window, page_size) + 16,
        state_slots=8 if runner.layout.state_slots else 0,
    )
    plan = MemoryPlan(0, Demand(0, 0, 0, page_size, max_model_len, None, None), layout, max_model_len)
    return ModelRunner(runner.architecture, runner._model, plan, 16, runner._place, KvFormat.MODEL)


class NoPipe:
    """The front's end: what was sent, and nothing to receive."""

    def __init__(self) -> None:
        self.sent: list[engine_pb2.EngineFrame] = []

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        self.sent.append(frame)

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]:
        raise NotImplementedError


@dataclass
class Seen:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    cached: int = 0
    error: pb.Error | None = None

    @property
    def ended(self) -> bool:
        return bool(self.finish) or self.error is not None


def decodes(slices: Sequence[Slice]) -> bool:
    return all(len(piece.token_ids) == 1 for piece in slices)


class Engine:
    """`settings`: of `SchedulerConfig`, beside what the runner's memory plan says. `ahead`: all decodes are
    launched, as they are on a GPU."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        ahead: bool = False,
        draw_tokens: Draw = REFERENCE.draw_tokens,
        **settings: Any,
    ) -> None:
        settings = {"max_running": 4, "max_step_tokens": 16, "max_waiting": 64} | settings
        self.runner, self.pipe = runner, NoPipe()
        config = SchedulerConfig(runner.layout, max_model_len=runner.max_model_len, **settings)
        grammars = Grammars(GrammarCompiler(lambda: None, lambda: None))  # type: ignore[arg-type, return-value]
        self.loop = EngineLoop(
            self.pipe,
            runner,
            Scheduler(config),
            partial(sample, draw_tokens=draw_tokens),
            grammars,
            max_running=config.places,
            eos_token_ids=[],
            faults=FaultInjector(()),
            ahead=RunAhead(runner, decodes, partial(choose, draw_tokens=draw_tokens)) if ahead else None,
        )
        self.seen: dict[int, Seen] = {}
        self.incoming: list[engine_pb2.FrontFrame] = []

    def submit(self, handle: int, token_ids: Sequence[int], **fields: Any) -> None:
        """Greedy, 8 tokens, unless told otherwise; it arrives with the next turn."""
        sampling = pb.Sampling(top_p=1, repetition_penalty=1)
        fields = {"max_tokens": 8, "sampling": sampling, "request_id": str(handle)} | fields
        submit = pb.Submit(handle=handle, token_ids=token_ids, **fields)
        self.incoming.append(engine_pb2.FrontFrame(submit=submit))
        self.seen[handle] = Seen()

    def cancel(self, handle: int) -> None:
        self.incoming.append(engine_pb2.FrontFrame(cancel=pb.Cancel(handle=handle)))

    def turn(self) -> bool:
        incoming, self.incoming = self.incoming, []
        busy = self.loop.turn(incoming)
        for frame in self.pipe.sent:
            for delta in frame.end.deltas:
                seen = self.seen[delta.handle]
                seen.tokens += delta.token_ids
                seen.finish = delta.finish_reason
                seen.cached += delta.cached_tokens
            for failure in frame.end.failures:
                self.seen[failure.handle].error = failure.error
        self.pipe.sent.clear()
        return busy

    def finish(self) -> None:
        """Until nothing is left to do."""
        for _ in range(5000):
            if not self.turn():
                return
        raise AssertionError("it does not end")

    def answer(self, token_ids: Sequence[int], **fields: Any) -> Seen:
        """To a request alone."""
        handle = 1 + max(self.seen, default=0)
        self.submit(handle, token_ids, **fields)
        self.finish()
        return self.seen[handle]


def is_empty(engine: Engine) -> bool:
    """Nothing that requests take is taken."""
    stats = engine.loop.stats()
    cache = engine.loop._scheduler.stats().cache
    used = (cache.pages_used, cache.window_pages.used, cache.state_slots.used)
    return (stats.running, stats.waiting, *used) == (0, 0, 0, 0, 0)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()
