"""What the layers of one step have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.rotary import Angles, Rotary
from moebius_kernels.state_plan import StatePlan
from moebius_worker.engine.layer_caches import LayerCache, StateTensors


@dataclass(frozen=True, slots=True)
class StepContext:
    """`token_ids` and `positions` int64 [T]; `sampled` int64 [S]: rows whose logits are wanted; `attention`
    by window; `caches` by the number of their spec."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    attention: Mapping[int | None, AttentionPlan | DeviceAttentionPlan]
    caches: Sequence[LayerCache]
    # None for a model without linear-state layers.
    states: StatePlan | None = None
    _angles: dict[Rotary, Angles] = field(default_factory=dict)

    def angles(self, rotary: Rotary) -> Angles:
        """Of the step's positions; computed once for all layers that share `rotary`."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary(self.positions)
        return self._angles[rotary]

    def kv(self, cache: int) -> tuple[KvPages, AttentionPlan | DeviceAttentionPlan]:
        found = self.caches[cache]
        assert isinstance(found.tensors, KvPages)
        return found.tensors, self.attention[found.window]

    def state(self, cache: int) -> tuple[StateTensors, StatePlan]:
        found = self.caches[cache]
        assert self.states is not None
        assert not isinstance(found.tensors, KvPages)
        return found.tensors, self.states
