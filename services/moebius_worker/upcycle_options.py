"""What there is to choose about upcycling; apart from it, since that loads PyTorch."""

from dataclasses import dataclass

from moebius_worker.checkpoint.checkpoint import CheckpointError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class UpcycleOptions:
    """How to upcycle.

    Of `experts` in a layer, `top_k` serve a token. `noise` is the standard deviation of what is added to each
    expert's weights, relative to theirs. Equal `seed`s give equal models.
    """

    experts: int = 4
    top_k: int = 2
    noise: float = 0.0
    seed: int = 0
    dtype: str = "bfloat16"

    def check(self) -> None:
        """Raises CheckpointError for options that make no model."""
        if self.experts < 1 or not 1 <= self.top_k <= self.experts:
            raise CheckpointError(
                f"{self.top_k} of {self.experts} experts cannot serve a token: take 1 <= top-k <= experts."
            )
        if not self.noise >= 0:
            raise CheckpointError(f"The noise must be 0 or more, not {self.noise}.")
        if self.dtype not in DTYPES:
            raise CheckpointError(f"The dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.")
