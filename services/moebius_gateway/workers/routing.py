"""Which of several workers gets a request: the least loaded, unless another has more of its prefix."""

from collections.abc import Hashable, Mapping, Sequence

from moebius_gateway.workers.view import WorkerView

# Tokens of a block; a prefix is compared in whole blocks.
BLOCK = 32
# Longer prompts are told apart by their first so many blocks.
MAX_BLOCKS = 512
# A cached prefix of so many tokens is worth so much of a worker's capacity in load; a shorter one less, for
# it saves less: many users of one short prompt would else share one worker while another has nothing to do.
AFFINITY_TOKENS = 1024
AFFINITY_WEIGHT = 0.5


def prefix_blocks(token_ids: Sequence[int], model: Hashable = None) -> tuple[int, ...]:
    """A hash for each whole block, each over all tokens up to the block's end and the model's name."""
    blocks: list[int] = []
    so_far = hash(model)
    for start in range(0, min(len(token_ids) // BLOCK, MAX_BLOCKS) * BLOCK, BLOCK):
        so_far = hash((so_far, tuple(token_ids[start : start + BLOCK])))
        blocks.append(so_far)
    return tuple(blocks)


def pick(workers: Sequence[WorkerView], matched: Mapping[str, int]) -> WorkerView:
    """The worker of least cost: its load, less what it has of the prefix.

    `matched` gives, by address, how many blocks of the prompt are probably cached there. Ties go to the
    worker with the fewest requests of this gateway, then to the first.
    """

    def cost(worker: WorkerView) -> tuple[float, int]:
        load = worker.load / max(worker.max_running, 1)
        saved = min(1.0, matched.get(worker.address, 0) * BLOCK / AFFINITY_TOKENS)
        return load - AFFINITY_WEIGHT * saved, worker.in_flight

    return min(workers, key=cost)
