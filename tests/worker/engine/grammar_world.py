"""The engine's loop without a front: requests in, texts out, step by step; the model is random."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler, grammar_tokenizer
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import EngineLoop, Runner
from moebius_worker.engine.sampler import sample
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Slice
from tests.tiny import SPECIAL, VOCAB_SIZE

# The model has more ids than its tokenizer, as those of real models have.
MODEL_VOCAB = VOCAB_SIZE + 40
EOS = SPECIAL.index("<|im_end|>")
PROMPT = [10, 11, 12]
LAYOUT = CacheLayout(16, 400)


class RandomModel:
    """Logits that depend on the last two tokens and the position, and on nothing else."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        self._seed, self._scale = seed, scale
        self.steps: list[tuple[int, ...]] = []

    def step(
        self, slices: Sequence[Slice], progress: Callable[[], None]
    ) -> tuple[torch.Tensor, Callable[[], frozenset[int]]]:
        self.steps.append(tuple(piece.handle for piece in slices))
        rows = [self._row(piece) for piece in slices if piece.sample]
        return torch.stack(rows) if rows else torch.zeros(0, MODEL_VOCAB), frozenset

    def _row(self, piece: Slice) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, piece.token_ids[-1], piece.end)) % 2**40)
        return self._scale * torch.randn(MODEL_VOCAB, generator=generator)


@dataclass
class Seen:
    """What came for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: int = pb.FINISH_REASON_UNSPECIFIED
    error: pb.Error | None = None

    @property
    def over(self) -> bool:
        return bool(self.finish) or self.error is not None


class World:
    """`seen` by handle."""

    def __init__(self, folder: Path, runner: Runner, layout: CacheLayout = LAYOUT) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.seen: dict[int, Seen] = {}
        self._woken = threading.Event()
        self._inbox: list[engine_pb2.FrontFrame] = []
        data = (folder / "tokenizer.json").read_bytes()
        compiler = GrammarCompiler(lambda: grammar_tokenizer(data, MODEL_VOCAB, (EOS,)), self._woken.set)
        self.grammars = Grammars(compiler)
        self.scheduler = Scheduler(SchedulerConfig(layout, 32, 256, 2048, 64))
        self._loop = EngineLoop(
            self,
            runner,
            self.scheduler,
            sample,
            self.grammars,
            max_running=32,
            eos_token_ids=[EOS],
            faults=FaultInjector(()),
        )

    def submit(
        self,
        handle: int,
        grammar: str | None,
        resumed: Sequence[int] = (),
        sampling: Any = None,
        **fields: Any,
    ) -> Seen:
        """At temperature 1 and at most 200 tokens, unless told otherwise."""
        chosen = {"temperature": 1, "top_p": 1, "repetition_penalty": 1, "seed": 7} | (sampling or {})
        submit = pb.Submit(
            handle=handle,
            request_id=f"request-{handle}",
            token_ids=[*PROMPT, *resumed],
            resumed=len(resumed),
            sampling=pb.Sampling(**chosen),
            **({"max_tokens": 200, "stop_token_ids": [EOS]} | fields),
        )
        if grammar is not None:
            submit.grammar.text = grammar
        self._inbox.append(engine_pb2.FrontFrame(submit=submit))
        self.seen[handle] = Seen()
        return self.seen[handle]

    def cancel(self, handle: int) -> None:
        self._inbox.append(engine_pb2.FrontFrame(cancel=pb.Cancel(handle=handle)))

    def turn(self) -> bool:
        frames, self._inbox = self._inbox, []
        return self._loop.turn(frames)

    def run(self) -> None:
        """Until all that were submitted are over."""
        deadline = time.monotonic() + 60
        while not all(seen.over for seen in self.seen.values()):
            assert time.monotonic() < deadline, "not within 60 s"
            if not self.turn():
                self._woken.wait(0.05)
                self._woken.clear()

    def generate(self, grammar: str | None, **fields: Any) -> Seen:
        seen = self.submit(len(self.seen) + 1, grammar, **fields)
        self.run()
        return seen

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens; a half character at the end is an error."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    # ---- the front's side ---------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]:
        raise NotImplementedError("this world calls `turn`")

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        for delta in frame.end.deltas:
            seen = self.seen[delta.handle]
            assert not seen.over, "nothing comes after the end"
            seen.tokens += delta.token_ids
            seen.logprobs += delta.logprobs
            seen.finish = delta.finish_reason
        for failure in frame.end.failures:
            self.seen[failure.handle].error = failure.error
