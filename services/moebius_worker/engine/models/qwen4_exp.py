"""Qwen3.8-Flash-Next (`qwen4_exp`): Qwen3.5's layers between hyper-connections, with sparse attention.

Some layers add what a table of n-grams of token ids knows. Served text-only.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from moebius_kernels.rotary import Rotary
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import require, text_config
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.gated_delta_net import GatedDeltaNet, read_delta_net
from moebius_worker.engine.models.hyper_connections import HyperConnection, StreamMixer, StreamsConfig
from moebius_worker.engine.models.indexed_attention import IndexedAttention, read_indexer
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.moe import MoeDecoder, read_experts
from moebius_worker.engine.models.ngram_embedding import NgramLayer, read_ngrams
from moebius_worker.engine.models.parameters import Place, Slots
from moebius_worker.engine.models.pre_norm import FeedForward, Mixer
from moebius_worker.engine.models.qwen3_5 import LAYOUT, linear_layers, read_sizes
from moebius_worker.engine.models.residual import Residual
from moebius_worker.engine.models.shared_expert import SharedExpertMoe
from moebius_worker.engine.weights.layout import Layout


class Qwen4ExpLayer(Layer):
    def __init__(
        self,
        streams: StreamsConfig,
        ngrams: NgramLayer | None,
        attention: Mixer,
        attention_name: str,
        mlp: FeedForward,
    ) -> None:
        self.ngrams = ngrams
        self.attention, self.attention_name, self.mlp = attention, attention_name, mlp
        self.attention_connection = HyperConnection(streams)
        self.mlp_connection = HyperConnection(streams)

    def __call__(self, residual: Residual, context: StepContext) -> Residual:
        """Of [T, streams * hidden]"""
        x = residual.total()
        if self.ngrams is not None:
            x = x + self.ngrams(x, context)
        x = self.attention_connection.around(x, partial(self.attention, context=context))
        return Residual(self.mlp_connection.around(x, self.mlp))

    def slots(self, prefix: str) -> Slots:
        slots = {} if self.ngrams is None else self.ngrams.slots(f"{prefix}.ple")
        return (
            slots
            | self.attention_connection.slots(f"{prefix}.attn_hyper_connection")
            | self.attention.slots(f"{prefix}.{self.attention_name}")
            | self.mlp_connection.slots(f"{prefix}.mlp_hyper_connection")
            | self.mlp.slots(f"{prefix}.mlp")
        )


class Qwen4ExpForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = LAYOUT
    NORM_NAME: ClassVar[str] = "model.hyper_connection_mixer"
    # Each layer masks what it does not select, and ranks the blocks.
    PAIR_BYTES: ClassVar[int] = 3 * MoeDecoder.PAIR_BYTES

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = {"hc_count": 4, "hc_lowrank": 320, **text_config(config)}
        sizes, caches = read_sizes(config), CacheSpecs()
        linear, rotary = read_delta_net(config, sizes), Rotary(sizes.rope, place.device)
        moe, shared = read_experts(config, sizes), require(config, "shared_expert_intermediate_size")
        renormalise = bool(config.get("norm_topk_prob", True))
        self.streams = StreamsConfig(
            sizes.hidden_size, require(config, "hc_count"), require(config, "hc_lowrank"), sizes.norm_eps
        )
        # Layers with n-grams are counted from 1.
        with_ngrams = sorted({number - 1 for number in config.get("ple_layer_ids") or ()})
        if not set(with_ngrams) <= set(range(sizes.num_layers)):
            raise CheckpointError(f"ple_layer_ids = {config['ple_layer_ids']} of {sizes.num_layers} layers.")
        attention = sizes.attention(qk_norm="head", norm_offset=1.0, output_gate=True)
        layers = []
        for index, is_linear in enumerate(linear_layers(config, sizes.num_layers)):
            ngrams = None
            if index in with_ngrams:
                ngrams = NgramLayer(read_ngrams(config), self.streams, with_ngrams.index(index), caches)
            mixer: Mixer
            if is_linear:
                mixer, name = GatedDeltaNet(linear, caches), "linear_attn"
            else:
                mixer = IndexedAttention(attention, read_indexer(config, sizes), rotary, caches)
                name = "self_attn"
            mlp = SharedExpertMoe(moe, shared, renormalise=renormalise)
            layers.append(Qwen4ExpLayer(self.streams, ngrams, mixer, name, mlp))
        super().__init__(
            sizes,
            moe,
            layers,
            caches,
            place,
            norm=StreamMixer(self.streams),
            row_elements=linear.row_elements + 8 * self.streams.width,
        )

    def embed(self, context: StepContext) -> torch.Tensor:
        """[T, streams * hidden]: all streams begin alike."""
        return super().embed(context).repeat(1, self.streams.count)
