"""Requests whose plans are on the device, for Triton's attention."""

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import AttentionPlanner
from moebius_kernels.triton.paged_attention import paged_attention
from tests.kernels.paged_world import DEVICE, World

MOST_REQUESTS, MOST_ROWS = 12, 400


class DeviceWorld(World):
    paged_attention = staticmethod(paged_attention)

    @staticmethod
    def write_kv(k, v, pages, plan):
        return reference.write_kv(k, v, pages, plan.expanded(k.dtype))

    def planner(self, window=None):
        return AttentionPlanner(
            max_requests=MOST_REQUESTS,
            max_rows=MOST_ROWS,
            max_model_len=1024,
            page_size=self.page_size,
            window=window,
            device=DEVICE,
        )

    def plan(self, spans, window=None):
        return self.planner(window).plan([Span(one.start, one.length, tuple(one.pages)) for one in spans])
