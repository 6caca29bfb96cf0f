"""Routed experts as DeepSeek-V3 has them, and after it GLM-4.x and MiniMax-M2.

Each expert has its own sigmoid score. A bias that balances the load has a say in the choice, and none in the
weights.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moebius_kernels.experts import routed_experts
from moebius_kernels.router import sigmoid_topk
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, require
from moebius_worker.engine.models.decoder import DecoderLayer
from moebius_worker.engine.models.layers import GatedMlp
from moebius_worker.engine.models.moe import (
    ExpertNames,
    ExpertStore,
    MoeConfig,
    MoeDecoder,
    ResidentExperts,
    num_experts,
)
from moebius_worker.engine.models.parameters import Matrix, Place, Slots, Vector


class SigmoidMoe:
    """[T, H] -> [T, H]. `routing`: keyword arguments of `sigmoid_topk`.

    `bias_name`: what the bias is called, after `prefix` in `slots`. `shared_inner`: neurons of a network that
    every token goes to; 0: there is none.
    """

    def __init__(
        self,
        config: MoeConfig,
        routing: Mapping[str, Any],
        *,
        bias_name: str,
        shared_inner: int = 0,
        names: ExpertNames | None = None,
    ) -> None:
        self.config, self.routing, self.bias_name = config, routing, bias_name
        self.router = Matrix({"gate": config.total}, config.hidden_size, plain=True)
        # What differs between experts in the last digits of a score decides who is chosen.
        self.bias = Vector(config.total, dtype=torch.float32)
        self.experts: ExpertStore = ResidentExperts(config, names or ExpertNames())
        self.shared = GatedMlp(config.hidden_size, shared_inner) if shared_inner else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.float() @ self.router.data.float().T
        route = sigmoid_topk(scores, self.config.per_token, bias=self.bias.data, **self.routing)
        y = routed_experts(x, route, self.experts.fetch(route), self.config.activation)
        return y if self.shared is None else y + self.shared(x)

    def slots(self, prefix: str) -> Slots:
        slots = {
            f"{prefix}.gate.weight": self.router.slot("gate"),
            f"{prefix}.{self.bias_name}": self.bias.slot(),
        }
        if self.shared is not None:
            slots |= self.shared.slots(f"{prefix}.shared_experts")
        return slots | self.experts.slots(f"{prefix}.experts")


def deepseek_moe(config: Mapping[str, Any], sizes: DecoderConfig) -> tuple[MoeConfig, dict[str, Any]]:
    """Sizes and arguments for `SigmoidMoe`, of a config with DeepSeek's keys. Raises CheckpointError."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, only) != only:
            raise CheckpointError(f"The config says {key} = {config[key]!r}; implemented is {only!r}.")
    moe = MoeConfig(
        hidden_size=sizes.hidden_size,
        inner=require(config, "moe_intermediate_size"),
        total=num_experts(config),
        per_token=require(config, "num_experts_per_tok"),
    )
    groups, top_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    if moe.total % groups or moe.total // groups * top_groups < moe.per_token:
        raise CheckpointError(
            f"The config has {moe.total} experts in {groups} groups and chooses {moe.per_token} experts "
            f"of {top_groups} groups, which cannot be."
        )
    routing = {
        "groups": groups,
        "top_groups": top_groups,
        "renormalise": bool(config.get("norm_topk_prob", True)),
        "scale": float(config.get("routed_scaling_factor", 1.0)),
    }
    shared_inner = moe.inner * int(config.get("n_shared_experts") or 0)
    return moe, {
        "routing": routing,
        "bias_name": "gate.e_score_correction_bias",
        "shared_inner": shared_inner,
    }


class MtpMoeDecoder(MoeDecoder):
    """Leaves out `mtp_layers` layers behind its own: they guess further tokens, and no token needs them."""

    def __init__(
        self,
        config: DecoderConfig,
        moe: MoeConfig,
        layers: Sequence[DecoderLayer],
        caches: CacheSpecs,
        place: Place,
        *,
        mtp_layers: int,
    ) -> None:
        super().__init__(config, moe, layers, caches, place)
        self.mtp_layers = mtp_layers

    def ignores(self, name: str) -> bool:
        if found := re.match(r"model\.layers\.(\d+)\.", name):
            beyond = int(found[1]) - self.config.num_layers
            if 0 <= beyond < self.mtp_layers:
                return True
        return super().ignores(name)


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Configs differ in what they call it."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    return next((int(config[key] or 0) for key in keys if key in config), 0)
