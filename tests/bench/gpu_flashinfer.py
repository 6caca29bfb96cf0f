"""FlashInfer's kernels beside ours on this GPU, where flashinfer-python is installed.

    python -m tests.bench.gpu_flashinfer [prompts draws experts decodes]

Prompts over pages of Qwen3-30B-A3B's widths (32 heads, 4 of keys, 128 wide, bf16), draws from rows of 151,936
logits, its routed experts in bf16; and decodes, for which FlashInfer has no backend here: as graphs, with
what its plan takes on the host in each step.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moebius_kernels.flashinfer.attention import PagedAttention
from moebius_kernels.flashinfer.experts import routed_experts
from moebius_kernels.flashinfer.sampling import draw_tokens
from moebius_kernels.sampling import CANDIDATES
from moebius_kernels.triton.experts import routed_experts as triton_experts
from moebius_kernels.triton.paged_attention import paged_attention
from moebius_kernels.triton.sampling import draw_tokens as triton_draw
from moebius_worker.engine.drawing import draws_of
from moebius_worker.engine.types import SampleRow, SamplingParams
from tests.bench.gpu_attention import (
    COLD_BYTES,
    DEVICE,
    PAGE,
    SHAPES,
    Decode,
    allocate,
    captured,
    median_us,
    planned,
)
from tests.bench.gpu_experts import product_of, trials_of

SHAPE = SHAPES[0]
VOCAB, CONTEXT = 151_936, 1024
# Requests of a step: (start, length) each.
PROMPTS = {
    "512": [(0, 512)],
    "2048": [(0, 2048)],
    "8192": [(0, 8192)],
    "4096 after 28672": [(28672, 4096)],
    "16 of 256": [(0, 256)] * 16,
    "4096 and 31 decodes": [(1023, 1)] * 31 + [(0, 4096)],
}


def host_us(call: Callable[[], Any], calls: int = 19) -> float:
    """Of the host alone: the device has nothing else to do."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return sorted(times)[calls // 2]


def off_by(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def said(error: Exception) -> str:
    return f"{type(error).__name__} {str(error)[-150:]}".replace("\n", " ")


def rate(name: str, us: float, flops: float) -> str:
    return f"{name} {us:.0f} us {flops / us / 1e6:.0f} TFLOP/s"


def prompts(name: str) -> Iterator[str]:
    spans = PROMPTS[name]
    # FlashInfer divides the work of a plan that it has not seen.
    plan, others = planned(SHAPE, spans), [planned(SHAPE, spans) for _ in range(2)] * 10
    kv = allocate(SHAPE, sum(-(-(start + length) // PAGE) for start, length in spans))
    rows = sum(length for _, length in spans)
    q = torch.randn(rows, SHAPE.heads, SHAPE.key_dim, device=DEVICE, dtype=torch.bfloat16)
    seen = sum(length * (start + length / 2) for start, length in spans)
    flops = 4.0 * SHAPE.heads * SHAPE.key_dim * seen
    expected = paged_attention(q, kv, plan)
    yield rate("triton", median_us(lambda: paged_attention(q, kv, plan), 7, 1), flops)
    for algorithm in ("fa3", "fa2"):
        attend = PagedAttention(algorithm)
        try:
            wrong = off_by(attend(q, kv, plan), expected)
            call = partial(attend, q, kv, plan)
            us, again = median_us(call, 7, 1), host_us(call)
            turns = iter(others)
            division = host_us(lambda attend=attend, turns=turns: attend(q, kv, next(turns))) - again
            yield f"{rate(algorithm, us, flops)} off by {wrong:.0e}, divided in {division:.0f} us"
        except Exception as error:
            yield f"{algorithm}: {said(error)}"


def decodes(batch: int) -> Iterator[str]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    case, plan = Decode(SHAPE, batch, CONTEXT), planned(SHAPE, [(CONTEXT - 1, 1)] * batch)
    pages = batch * CONTEXT // PAGE
    layers = [allocate(SHAPE, pages) for _ in range(max(2, min(48, COLD_BYTES // case.layer_bytes)))]
    q = torch.randn(batch, SHAPE.heads, SHAPE.key_dim, device=DEVICE, dtype=torch.bfloat16)
    ours = captured(lambda: [paged_attention(q, layer, plan) for layer in layers])
    yield f"triton {median_us(ours, 7, len(layers)):.1f} us (floor {case.floor_us:.1f})"
    starts = torch.arange(batch + 1, dtype=torch.int32) * (CONTEXT // PAGE)
    table = torch.arange(pages, dtype=torch.int32, device=DEVICE)
    full = torch.full((batch,), PAGE, dtype=torch.int32)
    for cores in (True, False):
        buffers = torch.zeros_like(starts, device=DEVICE), table.clone(), full.cuda()
        memory = torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)
        try:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", True, cores, *buffers)
            prepare = partial(
                wrapper.plan, starts, table, full, SHAPE.heads, SHAPE.kv_heads, SHAPE.key_dim, PAGE,
                q_data_type=q.dtype, kv_data_type=q.dtype,
            )  # fmt: skip
            prepare()
            caches = [(layer.keys.numbers, layer.values.numbers) for layer in layers if layer.values]
            run = captured(lambda wrapper=wrapper, caches=caches: [wrapper.run(q, one) for one in caches])
            us, host = median_us(run, 7, len(layers)), host_us(prepare)
            yield f"{'tensor cores' if cores else 'without'} {us:.1f} us, planned in {host:.0f} us"
        except Exception as error:
            yield f"{'tensor cores' if cores else 'without'}: {said(error)}"


def draws(rows: int) -> Iterator[str]:
    from flashinfer import top_k

    logits = 3 * torch.randn(rows, VOCAB, device=DEVICE)
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=20)
    wanted = draws_of([SampleRow(params, (), range(3))] * rows, DEVICE)
    ours, theirs = triton_draw(logits, wanted), draw_tokens(logits, wanted)
    yield "the same tokens" if torch.equal(ours.token_ids, theirs.token_ids) else "OTHER TOKENS"
    calls: dict[str, Callable[[], Any]] = {
        "triton": lambda: triton_draw(logits, wanted),
        "FlashInfer": lambda: draw_tokens(logits, wanted),
        "of that torch.topk": lambda: logits.topk(CANDIDATES, dim=-1),
        "top_k": lambda: top_k(logits, CANDIDATES, sorted=True, deterministic=True),
        "top_k, then sorted": lambda: top_k(logits, CANDIDATES, sorted=True),
    }
    for name, call in calls.items():
        try:
            yield f"{name} {median_us(captured(call), 9, 1):.0f} us"
        except Exception as error:
            yield f"{name}: {said(error)}"


def experts(tokens: int) -> Iterator[str]:
    trials = trials_of(product_of("qwen3", "bf16"), 1)
    (x, route), weights = trials.inputs(tokens), trials.weights[0]
    wrong = off_by(routed_experts(x, route, weights), triton_experts(x, route, weights))
    for name, function in (("triton", triton_experts), ("FlashInfer", routed_experts)):
        yield f"{name} {median_us(partial(function, x, route, weights), 7, 1):.0f} us"
    yield f"apart by {wrong:.0e}"


PARTS: dict[str, tuple[Callable[[Any], Iterator[str]], Sequence[Any]]] = {
    "prompts": (prompts, [*PROMPTS]),
    "draws": (draws, (1, 32, 128)),
    "experts": (experts, (512, 2048, 4096, 8192)),
    "decodes": (decodes, (1, 32, 128)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=", ".join(PARTS))
    for part in parser.parse_args().parts:
        function, cases = PARTS[part]
        for case in cases:
            words: list[str] = []
            try:
                words.extend(function(case))
            except Exception as error:
                words.append(said(error))
            print(f"{part} {case}: {'; '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
