"""Steps of decodes that are launched before the tokens of the step before are known to the host.

On a GPU all of it is in the order of one stream: a step's draw comes before the next one's upload and replay,
which write over its inputs and its logits. The ids that were drawn, and their copy on the host, are its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moebius_worker.engine.runner import ModelRunner
from moebius_worker.engine.types import SampleRow, Slice


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is under way with its draw."""

    # int64 [N], on the device and all in the vocabulary: what the next step can take its tokens from.
    drawn: torch.Tensor
    # int64 [N] on the host, once `arrived`; None: at once.
    found: torch.Tensor
    arrived: torch.cuda.Event | None

    def collect(self) -> list[int]:
        """Waits for the token ids of its slices; -1 where logits are not finite."""
        if self.arrived is not None:
            self.arrived.synchronize()
        token_ids: list[int] = self.found.tolist()
        return token_ids


class RunAhead:
    def __init__(
        self,
        runner: ModelRunner,
        offers: Callable[[Sequence[Slice]], bool],
        choose: Callable[[torch.Tensor, Sequence[SampleRow]], torch.Tensor],
    ) -> None:
        """`offers`: whether a step of these can be launched, and then those of a part of their requests.
        `choose`: the sampler's."""
        self._runner, self._choose = runner, choose
        self.offers = offers

    @torch.inference_mode()
    def launch(self, slices: Sequence[Slice], rows: Sequence[SampleRow], before: Launched | None) -> Launched:
        """A step of decodes, all of which sample, by plain `rows`. `before`: the step that it was planned
        ahead of. On a CPU it is computed here."""
        logits = self._runner.launch(slices, None if before is None else before.drawn)
        token_ids = self._choose(logits, rows)
        # A row that is not finite ends its request; until that is known the next step computes something.
        drawn = token_ids.clamp(min=0)
        if not token_ids.is_cuda:
            return Launched(drawn, token_ids, None)
        found = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        found.copy_(token_ids, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Launched(drawn, found, arrived)
