"""What steps of a model need at least: bytes that are read, and operations."""

import math

import torch

from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.parameters import Matrix, Shard

# Of an H200: bytes that can be read in a second, and operations in bf16.
BANDWIDTH, FLOPS = 4.3e12, 790e12


def step_bytes(model: Decoder, streams: int, context: float) -> float:
    """Of the experts that are hit, of everything else once, of keys and values of `context` tokens a stream,
    and of linear states, which are read and written."""
    routed = others = 0
    for matrix in {slot.owner for slot in model.slots().values()}:
        nbytes = sum(tensor.nbytes for tensor in matrix.tensors)
        if isinstance(matrix, Matrix) and matrix.shard is Shard.EXPERT:
            routed += nbytes
        elif matrix is not model.embedding or model.head is model.embedding:
            others += nbytes
    hit = 1 - (1 - model.expert_share) ** streams
    specs = model.caches.kv
    kept = sum(2 * 2 * spec.kv_heads * spec.key_dim * min(context, spec.window or context) for spec in specs)
    kept += 2 * model.caches.state_bytes(torch.bfloat16)
    return float(routed * hit + others + streams * kept)


def prefill_operations(model: Decoder, tokens: int) -> float:
    """Of the products with matrices; the head is needed once."""
    numbers = 0.0
    for matrix in {slot.owner for slot in model.slots().values()} - {model.embedding, model.head}:
        if isinstance(matrix, Matrix) and not matrix.host:
            share = model.expert_share if matrix.shard is Shard.EXPERT else 1.0
            numbers += share * sum(math.prod(block.shape) for block in matrix.blocks)
    return 2 * numbers * tokens
