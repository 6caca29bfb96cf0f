"""A preflight of one candidate: an implementation of the draw."""

from collections.abc import Callable

import torch

from moebius_kernels.plan import Plan, token_ranges
from moebius_kernels.registry import Backend, Registry, references
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.preflight.draw import draw_plan
from moebius_worker.preflight.machine import Machine
from moebius_worker.preflight.probe import Probe
from moebius_worker.preflight.report import Judged, Message
from moebius_worker.preflight.workload import Workload
from tests.worker.preflight import bad

RANGES = token_ranges(4)
VOCAB = 600


class Untimed(bad.SimulatedCuda):
    def microseconds(self, function: Callable[[], object], enough: float) -> float:
        function()
        return 1.0


MACHINE = Untimed()
CPU = torch.device("cpu")


def logits_of(rows: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def examine(function: Callable[..., object], machine: Machine = MACHINE, device: torch.device = CPU) -> Plan:
    """What the preflight makes of it: the workload's draws of decode steps, and all gates."""
    backend = Backend("draw_tokens", "candidate", function, devices=("cpu",))
    messages: list[Message] = []
    registry = Registry((*references(), backend), {})
    probe = Probe(registry, RANGES, bad.Tiny.device, machine, messages.append, capture_tokens=4)
    probe.kind = "decode"
    workload = Workload(CacheLayout(page_size=4, num_pages=1), VOCAB, 20)
    for rows in (1, 2, 3, 4):
        workload.draw(logits_of(rows).to(device), probe.operations().draw_tokens)
    verdicts = {(one.site, one.verdict.backend): one.verdict for one in messages if isinstance(one, Judged)}
    return draw_plan(verdicts, RANGES, capture_tokens=4, identity={})
