"""Stands for the package: the calls that the backends make, computed plainly, and noted."""

from types import SimpleNamespace

import torch


class Calls(list):
    """(name, positional, named) each."""

    def note(self, name, args, kwargs):
        self.append((name, args, kwargs))


CALLS = Calls()


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, *args, **kwargs):
        CALLS.note("BatchPrefillWithPagedKVCacheWrapper", args, kwargs)
        assert args[1] == "NHD"
        assert args[0].data_ptr() % 16 == 0

    def plan(self, *args, **kwargs):
        CALLS.note("BatchPrefillWithPagedKVCacheWrapper.plan", (self, *args), kwargs)
        assert all(tensor.device.type == "cpu" and tensor.dtype == torch.int32 for tensor in args[:4])
        self.rows, self.starts, self.pages, self.last = (tensor.tolist() for tensor in args[:4])
        self.heads, self.kv_heads, self.dim, self.page_size = args[4:]
        self.options = kwargs

    def run(self, *args, **kwargs):
        CALLS.note("BatchPrefillWithPagedKVCacheWrapper.run", (self, *args), kwargs)
        (q, (keys, values)), out = args, kwargs["out"]
        assert q.shape == out.shape == (self.rows[-1], self.heads, self.dim)
        assert keys.shape[1:] == values.shape[1:] == (self.page_size, self.kv_heads, self.dim)
        for request, last in enumerate(self.last):
            pages = self.pages[self.starts[request] : self.starts[request + 1]]
            assert min(pages) >= 0, "it reads all pages that it is given"
            count = (len(pages) - 1) * self.page_size + last
            rows = slice(self.rows[request], self.rows[request + 1])
            k, v = (part[pages].flatten(0, 1)[:count].float() for part in (keys, values))
            out[rows] = self._attend(q[rows].float(), k, v)

    def _attend(self, q, k, v):
        options, shared = self.options, self.heads // self.kv_heads
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(shared, 1)) * options["sm_scale"]
        if cap := options["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        key, row = torch.arange(len(k), device=q.device), torch.arange(len(q), device=q.device)[:, None]
        position = len(k) - len(q) + row
        hidden = key > position
        if options["window_left"] >= 0:
            hidden |= key < position - options["window_left"]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(shared, 1))


def top_k(*args, **kwargs):
    CALLS.note("top_k", args, kwargs)
    assert kwargs.pop("sorted")
    kwargs.pop("deterministic")
    return torch.topk(*args, dim=-1, **kwargs)


class SegmentGEMMWrapper:
    def __init__(self, *args, **kwargs):
        CALLS.note("SegmentGEMMWrapper", args, kwargs)

    def run(self, *args, **kwargs):
        CALLS.note("SegmentGEMMWrapper.run", (self, *args), kwargs)
        x, weights, count = args
        starts, out = kwargs["seg_indptr"].tolist(), kwargs["out"]
        assert kwargs["weight_column_major"]
        assert len(weights) == count == len(starts) - 1
        for index, matrix in enumerate(weights):
            rows = slice(starts[index], starts[index + 1])
            out[rows] = (x[rows].float() @ matrix.float().T).to(out.dtype)
        return out


# What is compiled: changed by tests.
TOPK, GEMM = (
    SimpleNamespace(name="topk", is_compiled=True),
    SimpleNamespace(name="gemm_sm90", is_compiled=True),
)
# Its modules below.
MODULES = {
    "flashinfer.jit": SimpleNamespace(),
    "flashinfer.jit.topk": SimpleNamespace(gen_topk_module=lambda: TOPK),
    "flashinfer.jit.gemm": SimpleNamespace(),
    "flashinfer.jit.gemm.core": SimpleNamespace(gen_gemm_sm90_module=lambda: GEMM),
}
