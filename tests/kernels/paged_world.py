"""Requests whose keys and values lie scattered over pages, and attention over them without pages."""

import random

import torch

from moebius_kernels.attention_plan import AttentionPlan, Span, plan_attention
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.paged_attention import paged_attention, write_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# (start, length) of one request each: first pieces, decodes, and pieces in the middle.
MIXED = [(0, 5), (40, 1), (3, 1), (16, 16), (0, 1), (100, 1), (31, 9), (41, 1), (0, 48)]


class World:
    """Draws requests, and compares paged with naive attention over them."""

    # Subclasses have other implementations.
    write_kv = staticmethod(write_kv)
    paged_attention = staticmethod(paged_attention)

    def __init__(
        self,
        heads,
        kv_heads,
        page_size,
        *,
        key_dim=32,
        value_dim=32,
        values_in_keys=False,
        num_pages=200,
        seed=0,
        dtype=torch.float32,
        format=KvFormat.MODEL,
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.page_size, self.dtype = heads, page_size, dtype
        self.pages = KvPages.allocate(
            format,
            num_pages,
            page_size,
            kv_heads,
            key_dim,
            value_dim,
            dtype,
            DEVICE,
            values_in_keys=values_in_keys,
        )
        # Leftovers of earlier requests: large, so that one that is looked at shows.
        everywhere = torch.arange(num_pages * page_size, device=DEVICE)
        for rows, leftover in ((self.pages.keys, 50.0), (self.pages.values, 1e4)):
            if rows is not None:
                shape = (len(everywhere), kv_heads, rows.dim)
                rows.write(torch.full(shape, leftover, dtype=dtype, device=DEVICE), everywhere)
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def request(self, length):
        """Its pages, keys and values; values None if they lie in the keys."""
        pages = [self.free.pop() for _ in range(-(-length // self.page_size))]
        k = self.random(length, self.pages.kv_heads, self.pages.key_dim)
        if self.pages.values is None:
            return pages, k, None
        return pages, k, self.random(length, self.pages.kv_heads, self.pages.value_dim)

    def plan(self, spans, window=None) -> AttentionPlan:
        return plan_attention(spans, page_size=self.page_size, window=window, dtype=self.dtype, device=DEVICE)

    def run(self, pieces, window=None, **scores):
        """`pieces`: (start, length) of one request each; what is before the start is already in the pages.

        Returns the plan, and what paged and naive attention give.
        """
        spans, queries, new_k, new_v, expected = [], [], [], [], []
        for start, length in pieces:
            pages, k, v = self.request(start + length)
            if start:
                past = self.plan([Span(0, start, pages)])
                self.write_kv(k[:start], None if v is None else v[:start], self.pages, past)
            # A window's layers have no pages before the window.
            gone = 0 if window is None else max(0, start - window + 1) // self.page_size
            q = self.random(length, self.heads, self.pages.key_dim)
            spans.append(Span(start, length, [-1] * gone + pages[gone:]))
            queries.append(q)
            new_k.append(k[start:])
            new_v.append(None if v is None else v[start:])
            values = k[..., : self.pages.value_dim] if v is None else v
            expected.append(naive_attention(q, k, values, start, window, **scores))
        plan = self.plan(spans, window)
        faults = self.write_kv(
            torch.cat(new_k), None if None in new_v else torch.cat(new_v), self.pages, plan
        )
        assert not faults.any()
        got = self.paged_attention(torch.cat(queries), self.pages, plan, **scores)
        assert got.dtype == self.dtype
        return plan, got.double(), torch.cat(expected)

    def check(self, pieces, window=None, tolerance=1e-5, **scores):
        plan, got, expected = self.run(pieces, window, **scores)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        return plan


def naive_attention(q, k, v, start, window, scale=None, softcap=None, sinks=None):
    """q [T, heads, Dk] at positions from `start`; k, v [L, KV, D]. One query at a time, in fp64."""
    shared = q.shape[1] // k.shape[1]
    output = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64, device=q.device)
    for row in range(q.shape[0]):
        last = start + row + 1
        first = 0 if window is None else max(0, last - window)
        for head in range(q.shape[1]):
            keys, values = k[first:last, head // shared].double(), v[first:last, head // shared].double()
            logits = keys @ q[row, head].double() * (scale or q.shape[-1] ** -0.5)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                # One more key, whose value is zero.
                logits = torch.cat((logits, sinks[head].double().reshape(1)))
                values = torch.cat((values, values.new_zeros(1, values.shape[1])))
            output[row, head] = logits.softmax(0) @ values
    return output
