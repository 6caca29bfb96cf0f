"""Routed experts as DeepSeek-V2 and V3 have them, and after them GLM-4.x and MiniMax-M2.

In V3 each expert has its own sigmoid score, and a bias that balances the load has a say in the choice of
experts, none in their weights.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig
from moebius_worker.engine.models.decoder import DecoderLayer
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import GatedMlp
from moebius_worker.engine.models.moe import (
    ExpertNames,
    ExpertStore,
    MoeConfig,
    MoeDecoder,
    ResidentExperts,
    Routing,
    read_experts,
)
from moebius_worker.engine.models.parameters import Matrix, Place, Slots, Vector
from moebius_worker.engine.models.pre_norm import FeedForward, dense_mlp


class DeepseekMoe(Layer):
    """[T, H] -> [T, H]. `routing`: of scores [T, E] and, if there is one, a bias [E].

    `bias_name`: what the bias is called, after `prefix` in `slots`; None: there is none. `shared_inner`:
    neurons of a network that every token goes to; 0: there is none.
    """

    def __init__(
        self,
        config: MoeConfig,
        routing: Routing,
        *,
        bias_name: str | None,
        shared_inner: int = 0,
        names: ExpertNames | None = None,
    ) -> None:
        self.config, self.routing, self.bias_name = config, routing, bias_name
        self.router = Matrix({"gate": config.total}, config.hidden_size, plain=True)
        # What differs between experts in the last digits of a score decides who is chosen.
        self.bias = None if bias_name is None else Vector(config.total, dtype=torch.float32)
        self.experts: ExpertStore = ResidentExperts(config, names or ExpertNames())
        self.shared = GatedMlp(config.hidden_size, shared_inner) if shared_inner else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.float() @ self.router.data.float().T
        more = {} if self.bias is None else {"bias": self.bias.data}
        route = self.routing(self.ops, scores, **more)
        y = self.ops.routed_experts(x, route, self.experts.fetch(route), self.config.activation)
        return y if self.shared is None else y + self.shared(x)

    def slots(self, prefix: str) -> Slots:
        slots = self.experts.slots(f"{prefix}.experts")
        slots[f"{prefix}.gate.weight"] = self.router.slot("gate")
        if self.bias is not None:
            slots[f"{prefix}.{self.bias_name}"] = self.bias.slot()
        return slots if self.shared is None else slots | self.shared.slots(f"{prefix}.shared_experts")


def deepseek_mlps(
    config: Mapping[str, Any], sizes: DecoderConfig, *, dense: int
) -> tuple[MoeConfig, list[FeedForward]]:
    """The sizes of the experts and the feed-forward networks of all layers, of a config with DeepSeek's keys.

    By default the first `dense` layers have no experts. Raises CheckpointError.
    """
    if (every := config.get("moe_layer_freq", 1)) != 1:
        raise CheckpointError(f"The config says moe_layer_freq = {every!r}; implemented is 1.")
    moe = read_experts(config, sizes)
    route, bias_name = _routing(config, moe)
    shared = moe.inner * int(config.get("n_shared_experts") or 0)
    return moe, [
        DeepseekMoe(moe, route, bias_name=bias_name, shared_inner=shared) if sparse else dense_mlp(sizes)
        for sparse in _sparse_layers(config, sizes.num_layers, dense)
    ]


def _sparse_layers(config: Mapping[str, Any], count: int, dense: int) -> list[bool]:
    dense = config.get("first_k_dense_replace", dense)
    default = ["dense" if index < dense else "sparse" for index in range(count)]
    kinds = config.get("mlp_layer_types") or default
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"The config says mlp_layer_types = {kinds}; {count} times 'dense' or 'sparse' is needed."
        )
    return [kind == "sparse" for kind in kinds]


def _routing(config: Mapping[str, Any], moe: MoeConfig) -> tuple[Routing, str | None]:
    """How experts are chosen, and the name of the bias that has a say in it."""
    groups, top_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    if moe.total % groups or moe.total // groups * top_groups < moe.per_token:
        raise CheckpointError(
            f"The config has {moe.total} experts in {groups} groups and chooses {moe.per_token} experts "
            f"of {top_groups} groups, which cannot be."
        )
    normalise = bool(config.get("norm_topk_prob", True))
    kinds: dict[str, Any] = {
        "top_k": moe.per_token,
        "renormalise": normalise,
        "scale": float(config.get("routed_scaling_factor", 1.0)),
        "groups": groups,
        "top_groups": top_groups,
    }
    method = config.get("scoring_func", "sigmoid"), config.get("topk_method", "noaux_tc")
    if method == ("sigmoid", "noaux_tc"):
        return Routing("sigmoid_topk", kinds), "gate.e_score_correction_bias"
    if method == ("softmax", "group_limited_greedy") and not normalise:
        return Routing("topk_softmax", kinds), None
    if method == ("softmax", "greedy") and not normalise:
        return Routing("topk_softmax", kinds | {"groups": 1, "top_groups": 1}), None
    raise CheckpointError(
        f"The config says scoring_func = {method[0]!r}, topk_method = {method[1]!r} and norm_topk_prob = "
        f"{normalise}; implemented are sigmoid with noaux_tc, and softmax with greedy or "
        "group_limited_greedy and without norm_topk_prob."
    )


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
        **parts: Any,
    ) -> None:
        """`parts`: as of `Decoder`."""
        super().__init__(config, moe, layers, caches, place, **parts)
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
