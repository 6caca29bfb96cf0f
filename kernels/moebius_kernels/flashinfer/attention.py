"""Attention of prompts by FlashInfer: FA3 on Hopper, FA2 elsewhere. Requests with one row are Triton's.

FlashInfer divides the work on the host: once a step, before the first of its layers, from the plan's spans.
A CUDA graph would keep what was divided for the step that it was captured with, and nothing in a replay would
tell: so it is never captured, and decodes, whose steps are graphs, are not its business.
"""

from typing import Any

import torch

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.flashinfer.admission import SUPPORTED, attention_refusal
from moebius_kernels.flashinfer.package import BUILD_SECONDS, required
from moebius_kernels.flashinfer.prompts import PromptBatch, prompt_batch
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.registry import Backend
from moebius_kernels.triton.decode_attention import decode_attention

required()

# For sums of parts of a row's keys, into which no row is divided here.
_PARTIAL_BYTES = 1 << 10


class PagedAttention:
    """As `moebius_kernels.paged_attention.paged_attention`, for calls with the same widths and scores.

    `algorithm`: "fa2" or "fa3"; None: what suits the device.
    """

    def __init__(self, algorithm: str | None = None) -> None:
        self._algorithm = algorithm
        self._plan: DeviceAttentionPlan | None = None
        self._batch: PromptBatch | None = None
        self._wrapper: Any = None
        # Behind the copies of the last division, from memory that the next one writes to.
        self._sent: torch.cuda.Event | None = None

    def __call__(
        self,
        q: torch.Tensor,
        kv_pages: KvPages,
        plan: AttentionPlan | DeviceAttentionPlan,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(plan, AttentionPlan):
            return reference.paged_attention(q, kv_pages, plan, scale=scale, softcap=softcap, sinks=sinks)
        assert kv_pages.values is not None
        factor = kv_pages.key_dim**-0.5 if scale is None else scale
        if plan is not self._plan:
            self._batch = prompt_batch(plan.spans, plan.page_size, plan.window)
            if self._batch is not None:
                self._divide(self._batch, q, kv_pages, plan, factor, softcap)
            self._plan = plan
        output = q.new_empty(*q.shape[:2], kv_pages.value_dim)
        if self._batch is not None:
            rows = slice(self._batch.first_row, self._batch.last_row)
            pages = kv_pages.keys.numbers, kv_pages.values.numbers
            self._wrapper.run(q[rows], pages, out=output[rows], enable_pdl=False)
        decode_attention(q, kv_pages, plan, output, factor, softcap, sinks)
        return output

    def _divide(
        self,
        batch: PromptBatch,
        q: torch.Tensor,
        kv_pages: KvPages,
        plan: DeviceAttentionPlan,
        scale: float,
        softcap: float | None,
    ) -> None:
        if self._wrapper is None:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            algorithm = self._algorithm or algorithm_for(torch.cuda.get_device_capability(q.device))
            partial = torch.empty(_PARTIAL_BYTES, dtype=torch.uint8, device=q.device)
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(partial, "NHD", backend=algorithm)
        if self._sent is not None:
            self._sent.synchronize()
        self._wrapper.plan(
            _int32(batch.row_starts),
            _int32(batch.page_starts),
            _int32(batch.pages, pinned=q.is_cuda),
            _int32(batch.last_page_lens),
            q.shape[1],
            kv_pages.kv_heads,
            kv_pages.key_dim,
            plan.page_size,
            causal=True,
            sm_scale=scale,
            # So many before a row's own.
            window_left=-1 if plan.window is None else plan.window - 1,
            logits_soft_cap=softcap,
            q_data_type=q.dtype,
            kv_data_type=kv_pages.keys.numbers.dtype,
            disable_split_kv=True,
        )
        if q.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record()


def algorithm_for(capability: tuple[int, int]) -> str:
    return "fa3" if capability == (9, 0) else "fa2"


def paged_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: AttentionPlan | DeviceAttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call by itself."""
    return PagedAttention()(q, kv_pages, plan, scale=scale, softcap=softcap, sinks=sinks)


def _int32(numbers: tuple[int, ...], *, pinned: bool = False) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned)


BACKENDS = (
    Backend(
        "paged_attention",
        "flashinfer",
        paged_attention,
        architectures=SUPPORTED,
        admits=attention_refusal,
        capturable=False,
        own=PagedAttention,
        build_seconds=BUILD_SECONDS,
    ),
)
