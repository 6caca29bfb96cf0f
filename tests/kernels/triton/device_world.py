"""Requests whose plans are on the device, for Triton's attention."""

from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import AttentionPlanner
from moebius_kernels.triton.paged_attention import paged_attention
from moebius_kernels.triton.write_kv import write_kv
from tests.kernels.paged_world import DEVICE, World

MOST_REQUESTS, MOST_ROWS = 12, 400


class DeviceWorld(World):
    write_kv = staticmethod(write_kv)
    paged_attention = staticmethod(paged_attention)

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
