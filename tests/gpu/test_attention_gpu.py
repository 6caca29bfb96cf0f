"""Attention in true sizes on a GPU, against attention over plain tensors in fp32; graphs against eager."""

import pytest
import torch

from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import AttentionPlanner
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.paged_attention import paged_attention as reference

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels.triton.paged_attention import paged_attention
from moebius_kernels.triton.write_kv import write_kv

DEVICE = torch.device("cuda")
PAGE = 16
# Query heads, KV heads, dimensions of keys and values, window, sinks.
SHAPES = {
    "qwen3-moe": (32, 4, 128, 128, None, False),
    "gpt-oss": (64, 8, 64, 64, 128, True),
    "qwen3.6": (16, 2, 256, 256, None, False),
    "gemma4 global": (16, 2, 512, 512, None, False),
    "deepseek": (128, 1, 576, 512, None, False),
}


class Requests:
    """Requests with keys and values in pages."""

    def __init__(self, shape, spans, format=KvFormat.MODEL, dtype=torch.bfloat16):
        self.heads, self.kv_heads, key_dim, value_dim, self.window, sinks = SHAPES[shape]
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        in_keys = key_dim != value_dim
        self.dtype, count = dtype, sum(-(-(start + length) // PAGE) for start, length in spans)
        self.pages = KvPages.allocate(
            format, count + 3, PAGE, self.kv_heads, key_dim, value_dim, dtype, DEVICE, values_in_keys=in_keys
        )
        self.sinks = self.random(self.heads) if sinks else None
        free = torch.randperm(count + 3).tolist()
        self.spans, self.keys, self.values = [], [], []
        for start, length in spans:
            pages = tuple(free.pop() for _ in range(-(-(start + length) // PAGE)))
            self.spans.append(Span(start, length, pages))
            self.keys.append(self.random(start + length, self.kv_heads, key_dim))
            own = None if in_keys else self.random(start + length, self.kv_heads, value_dim)
            self.values.append(own)
            whole = self.planner(1, start + length).plan([Span(0, start + length, pages)])
            assert not write_kv(self.keys[-1], own, self.pages, whole).any()
        self.q = self.random(sum(length for _, length in spans), self.heads, key_dim)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator, device=DEVICE).to(self.dtype)

    def planner(self, requests, rows):
        return AttentionPlanner(
            max_requests=requests,
            max_rows=rows,
            max_model_len=32768,
            page_size=PAGE,
            window=self.window,
            device=DEVICE,
        )

    def attend(self, plan):
        return paged_attention(self.q, self.pages, plan, sinks=self.sinks)

    def expected(self):
        outputs, row = [], 0
        for span, keys, values in zip(self.spans, self.keys, self.values, strict=True):
            values = keys[..., : self.pages.value_dim] if values is None else values
            q = self.q[row : row + span.length].float().unflatten(1, (self.kv_heads, -1))
            row += span.length
            scores = torch.einsum("tkgd,skd->kgts", q, keys.float()) * q.shape[-1] ** -0.5
            position = torch.arange(span.start, span.end, device=DEVICE)[:, None]
            key = torch.arange(span.end, device=DEVICE)
            hidden = key > position
            if self.window is not None:
                hidden |= key <= position - self.window
            scores.masked_fill_(hidden, float("-inf"))
            if self.sinks is not None:
                sink = self.sinks.float().view(self.kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = scores.softmax(-1)[..., : span.end]
            outputs.append(torch.einsum("kgts,skd->tkgd", weights, values.float()).flatten(1, 2))
        return torch.cat(outputs)


def check(got, expected, limit):
    assert (got.float() - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("format", "limit"), [(KvFormat.MODEL, 0.006), (KvFormat.FP8, 0.05), (KvFormat.INT8, 0.012)]
)
def test_decode_and_prefill(shape, format, limit):
    requests = Requests(shape, [(0, 1), (900, 300), (500, 1), (0, 257), (7000, 1), (127, 1)], format)
    plan = requests.planner(6, 1000).plan(requests.spans)
    torch.use_deterministic_algorithms(True, warn_only=True)
    got = requests.attend(plan)
    torch.use_deterministic_algorithms(False)
    check(got, requests.expected(), limit)
    assert not plan.arrivals.any()
    # The order in which programs arrive must not matter.
    for _ in range(5):
        assert torch.equal(requests.attend(plan), got)


@pytest.mark.parametrize(
    "spans", [[(2481, 257)], [(1000, 65), (0, 129)], [(2737, 1), (30, 1), (11, 1)]], ids=str
)
def test_the_reference_where_it_needs_a_mask(spans):
    """PyTorch's own attention is wrong in the last row of the first: the reference may not take it there."""
    requests = Requests("qwen3-moe", spans)
    plan = requests.planner(len(spans), 1000).plan(requests.spans)
    got, expected = reference(requests.q, requests.pages, plan), requests.expected()
    errors = (got.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert errors.max() < 0.006


@pytest.mark.parametrize("shape", ["qwen3-moe", "gpt-oss"])
def test_a_graph_replays_what_it_was_not_captured_with(shape):
    requests = Requests(shape, [(0, 1), (5000, 1), (130, 1), (20000, 1)])
    planner = requests.planner(8, 8)
    requests.q = torch.cat((requests.q, requests.random(4, *requests.q.shape[1:])))
    plan = planner.plan(requests.spans[:1], pad_to=8)
    requests.attend(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = requests.attend(plan)
    planner.plan(requests.spans, pad_to=8)
    output.fill_(float("nan"))
    graph.replay()
    requests.q = requests.q[:4]
    check(output[:4], requests.expected(), 0.006)
    assert not output[4:].any()
