"""Routed experts beside one that every token goes to, as the Qwen families have it."""

import torch

from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import GatedMlp, Linear
from moebius_worker.engine.models.moe import MoeConfig, Routing, SparseMoe
from moebius_worker.engine.models.parameters import Slots


class SharedExpertMoe(Layer):
    """The sum of the routed experts and of the shared one, to which each token has a gate of its own."""

    def __init__(self, moe: MoeConfig, shared_inner: int, *, renormalise: bool = True) -> None:
        routing = Routing("topk_softmax", {"top_k": moe.per_token, "renormalise": renormalise})
        self.routed = SparseMoe(moe, routing)
        self.shared = GatedMlp(moe.hidden_size, shared_inner, activation=moe.activation)
        self.shared_gate = Linear(moe.hidden_size, {"shared_expert_gate": 1})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + self.shared_gate(x).sigmoid() * self.shared(x)

    def slots(self, prefix: str) -> Slots:
        return (
            self.routed.slots(prefix)
            | self.shared.slots(f"{prefix}.shared_expert")
            | self.shared_gate.slots(prefix)
        )
