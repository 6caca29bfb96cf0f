"""What layers add to, and the norms that do the adding."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Residual:
    """The sum of `x` and `y`, both [T, hidden]; None: of x alone.

    Who normalises it next adds up: one launch for both, and one pass over the numbers.
    """

    x: torch.Tensor
    y: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        return self.x if self.y is None else self.x + self.y
