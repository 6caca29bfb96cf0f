"""Scheduler, caches and models together: texts come out as transformers says, whatever happens on the way.

The pools are so small that requests are preempted and what is cached is evicted; prompts share beginnings;
requests come, go and are cancelled at any moment.
"""

import random

import pytest
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moebius_kernels.kv_pages import KvFormat
from moebius_worker.engine.cache.layout import CacheLayout, window_reach
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.memory import Demand, MemoryPlan
from moebius_worker.engine.runner import ModelRunner
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Request, SamplingParams
from tests.worker.engine.models.harness import load, write_random
from tests.worker.engine.models.qwen_world import EXPERTS, SCALES
from tests.worker.engine.models.qwen_world import SIZES as QWEN_SIZES

COMMON = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HALF = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}
MODELS = {
    "full attention": lambda: (Qwen3MoeForCausalLM(Qwen3MoeConfig(**(COMMON | FEW))), {}),
    "window": lambda: (MistralForCausalLM(MistralConfig(**(COMMON | {"sliding_window": 9}))), {}),
    "window and full": lambda: (
        GptOssForCausalLM(GptOssConfig(**(COMMON | HALF | {"num_local_experts": 6}))),
        {},
    ),
    "window and full, unlike heads": lambda: (
        Gemma4ForCausalLM(
            Gemma4TextConfig(
                **(
                    COMMON
                    | HALF
                    | {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "pad_token_id": 0}
                )
            )
        ),
        {},
    ),
    "states and full": lambda: (
        Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(QWEN_SIZES | EXPERTS | {"eos_token_id": None}))),
        SCALES,
    ),
}
PAGES, STEP_TOKENS, RUNNING, REQUESTS = 40, 24, 5, 30
# Two tokens may come in either order if their logits are closer than rounding makes them.
MARGIN = 1e-3


def with_small_pools(runner):
    """The same model with caches that hold a few texts."""
    page_size, window = runner.layout.page_size, runner.layout.window
    layout = CacheLayout(
        page_size=page_size,
        num_pages=PAGES,
        window=window,
        num_window_pages=0 if window is None else 4 * window_reach(window, page_size) + 8,
        state_slots=9 if runner.layout.state_slots else 0,
    )
    demand = Demand(0, 0, 0, page_size, PAGES * page_size, None, None, max_running=RUNNING)
    plan = MemoryPlan(0, demand, layout, PAGES * page_size)
    return ModelRunner(runner.architecture, runner._model, plan, STEP_TOKENS, runner._place, KvFormat.MODEL)


class Traffic:
    """Requests whose prompts begin with one of a few texts, or go on from what another one said."""

    def __init__(self, seed, page_size):
        self.random = random.Random(seed)
        self.page_size = page_size
        self.texts = [self.tokens(n) for n in (13, 32, 47)]

    def tokens(self, count):
        return tuple(self.random.randrange(3, 384) for _ in range(count))

    def request(self, handle):
        text = self.random.choice(self.texts)
        prompt = text[: self.random.randint(1, len(text))] + self.tokens(self.random.randint(1, 9))
        return Request(
            handle=handle,
            request_id=str(handle),
            token_ids=prompt,
            resumed=0,
            max_tokens=self.random.randint(1, 40),
            min_tokens=0,
            stop_token_ids=frozenset(),
            sampling=SamplingParams(temperature=0),
        )


@pytest.mark.parametrize("kind", MODELS)
def test_every_text_is_right(tmp_path, kind):
    model, scales = MODELS[kind]()
    path, reference = write_random(tmp_path, model, scales=scales), model.float().eval()
    runner = with_small_pools(load(path))
    scheduler = Scheduler(
        SchedulerConfig(
            runner.layout,
            max_running=RUNNING,
            max_step_tokens=STEP_TOKENS,
            max_model_len=PAGES * runner.layout.page_size,
            max_waiting=REQUESTS,
            snapshot_interval=16,
        )
    )
    traffic = Traffic(1, runner.layout.page_size)
    requests, outputs, cancelled, done = {}, {}, set(), set()
    for now in range(2000):
        if len(requests) < REQUESTS and traffic.random.random() < 0.4:
            request = traffic.request(len(requests))
            requests[request.handle], outputs[request.handle] = request, []
            scheduler.add(request)
        alive = sorted(requests.keys() - done - cancelled)
        if alive and traffic.random.random() < 0.02:
            cancelled.add(handle := traffic.random.choice(alive))
            scheduler.cancel(handle)
        plan = scheduler.schedule(float(now))
        if not plan.slices:
            if len(requests) == REQUESTS:
                break
            continue
        computed = runner.step(plan.slices)
        assert not computed.faulty()
        sampled = dict(
            zip(
                (piece.handle for piece in plan.slices if piece.sample),
                ([token] for token in computed.logits.argmax(-1).tolist()),
                strict=True,
            )
        )
        for output in scheduler.complete(plan, sampled):
            outputs[output.handle] += output.token_ids
            if output.finish is not None:
                done.add(output.handle)
                # A next turn begins with all that was said in this one.
                text = requests[output.handle].token_ids + tuple(outputs[output.handle])
                traffic.texts = [*traffic.texts[:2], text[:60]]
    stats = scheduler.stats()
    assert done | cancelled == set(range(REQUESTS))
    assert stats.preemptions > 0, "the pools are too large for this test"
    assert stats.cached_tokens > 50
    for handle in done:
        request, said = requests[handle], outputs[handle]
        assert len(said) == request.max_tokens
        ids = torch.tensor([(*request.token_ids, *said)])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(request.token_ids) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert behind.max() < MARGIN, f"request {handle}"
