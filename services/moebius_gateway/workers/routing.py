"""Which of several workers gets a request: the least loaded, unless another has more of its prefix."""

import math
from collections.abc import Hashable, Mapping, Sequence

from moebius_gateway.workers.view import Standing

# Tokens of a block; a prefix is compared in whole blocks.
BLOCK = 32
# Longer prompts are told apart by their first so many blocks.
MAX_BLOCKS = 512
# A cached prefix of so many blocks is worth so much of a worker's capacity in load; a shorter one less, for
# it saves less: many users of one short prompt would else share one worker while another has nothing to do.
AFFINITY_BLOCKS = 32
AFFINITY_WEIGHT = 0.5


def prefix_blocks(token_ids: Sequence[int], model: Hashable = None) -> tuple[int, ...]:
    """A hash for each whole block, each over all tokens up to the block's end and the model's name."""
    blocks: list[int] = []
    so_far = hash(model)
    for start in range(0, min(len(token_ids) // BLOCK, MAX_BLOCKS) * BLOCK, BLOCK):
        so_far = hash((so_far, tuple(token_ids[start : start + BLOCK])))
        blocks.append(so_far)
    return tuple(blocks)


def pick(workers: Sequence[Standing], matched: Mapping[str, int]) -> str:
    """The address of the worker of least cost: its load, less what it has of the prefix.

    `matched` gives, by address, how many blocks of the prompt are probably cached there. Ties go to the
    worker with the fewest requests of this gateway, then to the first.
    """
    best, least = "", (math.inf, 0)
    for worker in workers:
        cost = worker.load / worker.max_running
        if worker.address in matched:
            cost -= AFFINITY_WEIGHT * min(1.0, matched[worker.address] / AFFINITY_BLOCKS)
        if (cost, worker.in_flight) < least:
            best, least = worker.address, (cost, worker.in_flight)
    return best
