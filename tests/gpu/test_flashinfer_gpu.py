"""FlashInfer's kernels on a GPU, by themselves and against what is computed in fp32."""

import pytest
import torch

from moebius_kernels.attention_plan import Span
from moebius_kernels.calls import named_arguments, shapes_of
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.dense import Dense, dense
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.operations import REFERENCE
from moebius_kernels.registry import Query, TokenRange, gather, refusal
from moebius_kernels.router import topk_softmax
from moebius_worker.preflight.gates import Trial, judge
from moebius_worker.preflight.machine import Cuda, device_here

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("flashinfer")

from moebius_kernels.flashinfer.attention import PagedAttention
from moebius_kernels.flashinfer.experts import routed_experts
from moebius_kernels.flashinfer.sampling import draw_tokens
from moebius_kernels.triton.sampling import draw_tokens as triton_draw
from moebius_worker.engine.drawing import draws_of
from tests.gpu.test_attention_gpu import SHAPES, Requests, check
from tests.kernels.triton.test_sampling import KINDS, draws_on_device, logits_of, rows_of

# Decodes before, among and after the prompts.
SPANS = [(500, 1), (900, 300), (7000, 1), (0, 257), (127, 1), (3000, 2), (16, 1)]


@pytest.fixture(params=["fa2", "fa3"])
def attention(request):
    if request.param == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 is for Hopper")
    return PagedAttention(request.param)


def attend(requests, attention, plan):
    return attention(requests.q, requests.pages, plan)


def test_prompts_among_decodes(attention):
    requests = Requests("qwen3-moe", SPANS)
    plan = requests.planner(8, 1000).plan(requests.spans)
    got = attend(requests, attention, plan)
    check(got, requests.expected(), 0.006)
    for _ in range(5):
        assert torch.equal(attend(requests, attention, plan), got)


def test_prompts_with_a_window(attention, monkeypatch):
    monkeypatch.setitem(SHAPES, "windowed", (32, 4, 128, 128, 128, False))
    requests = Requests("windowed", SPANS)
    gone = [max(0, span.start - 127) // 16 for span in requests.spans]
    requests.spans = [
        Span(span.start, span.length, (*[-1] * first, *span.pages[first:]))
        for span, first in zip(requests.spans, gone, strict=True)
    ]
    plan = requests.planner(8, 1000).plan(requests.spans)
    check(attend(requests, attention, plan), requests.expected(), 0.006)


def test_steps_that_are_launched_while_the_one_before_is_computed(attention):
    """Nobody waits: a step's division must not reach the device in place of the one before."""
    worlds = [Requests("qwen3-moe", spans) for spans in ([(0, 3000)], [(5000, 700), (9, 40)], [(64, 900)])]
    plans = [world.planner(4, 4096).plan(world.spans) for world in worlds]
    expected = [attend(world, attention, plan) for world, plan in zip(worlds, plans, strict=True)]
    for world, found in zip(worlds, expected, strict=True):
        check(found, world.expected(), 0.006)
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        torch.mm(busy, busy)
    rounds = [
        attend(world, attention, plan) for _ in range(4) for world, plan in zip(worlds, plans, strict=True)
    ]
    for index, found in enumerate(rounds):
        assert torch.equal(found, expected[index % 3])


def test_a_query_that_is_not_finite_shows_in_its_row_alone(attention):
    requests = Requests("qwen3-moe", [(0, 300), (40, 1)])
    plan = requests.planner(2, 400).plan(requests.spans)
    healthy = attend(requests, attention, plan)
    requests.q[7, 3, 5], requests.q[250, 0, 0] = float("nan"), float("inf")
    got = attend(requests, attention, plan)
    faults = got.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    assert faults == [7, 250]
    rest = [row for row in range(301) if row not in faults]
    assert torch.equal(got[rest], healthy[rest])


def gates(operation, args, tokens):
    """What the preflight makes of the backend, called so."""
    [backend] = (one for one in gather().of(operation) if one.name == "flashinfer")
    arguments = named_arguments(operation, args, {})
    query = Query(operation, shapes_of(operation, arguments), tokens, device_here("cuda"))
    assert refusal(backend, query) is None
    trial = Trial(query, arguments, getattr(REFERENCE, operation)(*args), {}, capture=backend.capturable)
    gates = []
    verdict = judge(backend, trial, Cuda(), gates.append, timed=True)
    assert verdict.rejected is None, verdict.reason
    assert verdict.captured == backend.capturable
    print(f"{operation}: {verdict.microseconds:.0f} us, off by {verdict.error:.0e}")


def test_attention_passes_the_gates_of_the_preflight():
    requests = Requests("qwen3-moe", SPANS)
    plan = requests.planner(8, 1000).plan(requests.spans)
    gates("paged_attention", (requests.q, requests.pages, plan), TokenRange(513, 1024))


def test_draws_pass_the_gates_of_the_preflight():
    logits = logits_of(len(KINDS), 151_936).cuda()
    draws = draws_on_device(draws_of(rows_of(KINDS), torch.device("cpu")))
    gates("draw_tokens", (logits, draws), TokenRange(9, 16))


def test_draws_are_those_of_ours():
    kinds = KINDS * 10
    for vocab in (1000, 151_936):
        logits = logits_of(len(kinds), vocab).cuda()
        draws = draws_on_device(draws_of(rows_of(kinds), torch.device("cpu")))
        mine, ours = draw_tokens(logits, draws), triton_draw(logits, draws)
        assert torch.equal(mine.token_ids, ours.token_ids)
        assert torch.equal(mine.best, ours.best)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="it is for Hopper"
)
@pytest.mark.parametrize("tokens", [257, 1024])
def test_experts(tokens):
    generator = torch.Generator("cuda").manual_seed(0)
    form = Dense(torch.bfloat16)
    weights = ExpertWeights(
        [random_matrix(form, (16, 2 * 384, 512), generator)], random_matrix(form, (16, 512, 384), generator)
    )
    x = torch.randn(tokens, 512, generator=generator, device="cuda").bfloat16()
    scores = torch.randn(tokens, 16, generator=generator, device="cuda")
    # Nobody gets expert 3, and nearly everybody expert 5.
    scores[:, 3], scores[:, 5] = -100.0, scores[:, 5] + 3
    route = topk_softmax(scores, 4)
    wide = ExpertWeights([dense(weights.gate_up[0].dequantize())], dense(weights.down.dequantize()))
    got = routed_experts(x, route, weights)
    check(got, reference(x.float(), route, wide), 0.01)
    assert torch.equal(routed_experts(x, route, weights), got)
    gates("routed_experts", (x, route, weights), TokenRange(513, 1024))
