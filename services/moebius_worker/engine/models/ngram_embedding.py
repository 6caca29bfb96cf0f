"""Embeddings of n-grams of token ids, looked up by hash in a table that stays in the host's memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Any

import torch

from moebius_kernels.linear import embedding
from moebius_kernels.ngrams import hashed_rows, ngrams
from moebius_kernels.splitmix import GOLDEN, hashed
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs, StateSpec
from moebius_worker.engine.models.config import require
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.hyper_connections import StreamNorm, StreamsConfig
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear
from moebius_worker.engine.models.parameters import Matrix, Slots, Vector

# What configs that do not say it mean.
_DEFAULTS: Mapping[str, int] = {
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "ple_conv_kernel_size": 4,
    "split_ngram_parts": 512,
    "seed": 1234,
}


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """A table with `heads` parts for each length of n-gram from 2 to `longest`; their rows are `width` long
    together.

    A head has `rows` rows or a few more. `taps`: of the convolution, `longest` tokens apart. `end`: the token
    that no n-gram reaches back over. `parts`: into how many tensors checkpoints divide the table.
    """

    vocab_size: int
    longest: int
    heads: int
    width: int
    rows: int
    rows_multiple: int
    taps: int
    end: int
    seed: int
    parts: int

    @property
    def total_heads(self) -> int:
        return (self.longest - 1) * self.heads


def read_ngrams(config: Mapping[str, Any]) -> NgramConfig:
    """Raises CheckpointError."""
    config = {**_DEFAULTS, **config}
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if not isinstance(end, int):
        raise CheckpointError(
            f"The config says eos_token_id = {ends!r}; n-grams need to know where a text ends."
        )
    ngram = NgramConfig(
        vocab_size=require(config, "vocab_size"),
        longest=require(config, "ngram_size"),
        heads=require(config, "heads_per_ngram"),
        width=config.get("ple_embed_dim") or require(config, "hidden_size"),
        rows=require(config, "ngram_vocab_size_base"),
        rows_multiple=require(config, "make_ngram_vocab_size_divisible_by"),
        taps=require(config, "ple_conv_kernel_size"),
        end=end,
        seed=config["seed"],
        parts=require(config, "split_ngram_parts"),
    )
    if ngram.longest < 2 or ngram.width % ngram.total_heads:
        raise CheckpointError(
            f"ple_embed_dim = {ngram.width} cannot be divided among n-grams of up to {ngram.longest} tokens "
            f"with {ngram.heads} heads each."
        )
    return ngram


class NgramTable(Layer):
    """[T] token ids, and those before them -> [T, width]. `number`: which of the model's tables it is."""

    ASKS_HOST = True

    def __init__(self, config: NgramConfig, number: int) -> None:
        self.config = config
        first = number * config.total_heads
        sizes = list(islice(_primes(config.rows), first, first + config.total_heads))
        *offsets, total = accumulate(sizes, initial=0)
        rows = -(-total // config.rows_multiple) * config.rows_multiple
        self.table = Matrix(_divided(rows, config.parts), config.width // config.total_heads, host=True)
        self.numbers = {
            name: Vector(len(values), dtype=torch.int64, default=torch.tensor(values))
            for name, values in {
                "layer_multipliers": _multipliers(config, number),
                "ngram_heads_vocab_sizes": sizes,
                "ngram_heads_offsets": offsets,
            }.items()
        }

    def __call__(self, grams: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """grams [T, longest], as `ngrams` makes them."""
        rows = hashed_rows(grams, *(numbers.data for numbers in self.numbers.values()))
        [table] = self.table.blocks
        found = embedding(rows.flatten().cpu(), table, dtype)
        return found.to(grams.device).view(len(grams), -1)

    def slots(self, prefix: str) -> Slots:
        return {
            f"{prefix}.ngram_embedding.{part}.weight": self.table.slot(part) for part in self.table.parts
        } | {f"{prefix}.{name}": numbers.slot() for name, numbers in self.numbers.items()}


class NgramLayer(Layer):
    """What n-grams add to the streams of hyper-connections, each stream with a gate of its own."""

    def __init__(self, config: NgramConfig, streams: StreamsConfig, number: int, caches: CacheSpecs) -> None:
        self.config, self.streams = config, streams
        self.table = NgramTable(config, number)
        self.inputs = Linear(config.width, {"key_proj": streams.width, "value_proj": streams.hidden_size})
        self.norms = {name: StreamNorm(streams) for name in ("norm_key", "norm_query", "norm_conv")}
        self.convolution = Vector(streams.width, config.taps)
        self.cache = caches.add(
            StateSpec(
                {
                    "tokens": (config.longest - 1,),
                    "convolution": (streams.width, (config.taps - 1) * config.longest),
                },
                {"tokens": torch.int64},
            )
        )

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """x [T, streams * hidden] -> what is to be added to it."""
        config, streams = self.config, self.streams
        states, plan = context.state(self.cache)
        grams = ngrams(context.token_ids, states["tokens"], plan, length=config.longest, end=config.end)
        key, value = self.inputs(self.table(grams, x.dtype)).split(
            [streams.width, streams.hidden_size], dim=-1
        )
        products = self.norms["norm_key"](key) * self.norms["norm_query"](x)
        match = products.unflatten(-1, (streams.count, -1)).sum(dim=-1, keepdim=True)
        match = match / math.sqrt(streams.hidden_size)
        gate = (match.abs().clamp_min(1e-6).sqrt() * match.sign()).sigmoid()
        gated = (gate * value.unsqueeze(-2)).flatten(-2)
        nearby = self.ops.causal_conv1d(
            self.norms["norm_conv"](gated),
            self.convolution.data,
            None,
            states["convolution"],
            plan,
            "silu",
            dilation=config.longest,
        )
        return gated + nearby

    def slots(self, prefix: str) -> Slots:
        slots = self.inputs.slots(prefix) | self.table.slots(f"{prefix}.ple_embedding")
        for name, norm in self.norms.items():
            slots |= norm.slots(f"{prefix}.{name}")
        return slots | {f"{prefix}.conv1d.weight": self.convolution.slot()}


def _divided(rows: int, parts: int) -> dict[str, int]:
    """Equal parts but for the last, as `torch.chunk` makes them."""
    step = -(-rows // parts)
    return {f"shard_{index}": min(step, rows - start) for index, start in enumerate(range(0, rows, step))}


def _primes(least: int) -> Iterator[int]:
    """From `least` on."""
    for value in count(least):
        if value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            yield value


def _multipliers(config: NgramConfig, number: int) -> list[int]:
    """Odd numbers that take no token's product out of 63 bits, drawn by SplitMix64 from the table's seed.

    By 10007 the seeds of a family's tables differ. Their first numbers are left out.
    """
    bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + 10_007 * number
    draws = (hashed(seed + GOLDEN * nth) for nth in range(2, config.longest + 2))
    return [2 * (draw % bound) + 1 for draw in draws]
