"""The sizes of a model's caches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a worker keeps of the text that it has seen, by kinds of layers.

    Full-attention layers: `num_pages` pages of `page_size` tokens. Sliding-window layers, if any, look back
    `window` tokens (a position sees itself and the `window - 1` before it) and have `num_window_pages` pages
    of their own. Linear-attention layers, if any, have `state_slots` slots, each of which holds what they
    know at one position of one text: one for each running request, the others for snapshots.
    """

    page_size: int
    num_pages: int
    window: int | None = None
    num_window_pages: int = 0
    state_slots: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.state_slots < 0:
            raise ValueError(f"state_slots must not be negative, but is {self.state_slots}")
        if self.window is None:
            if self.num_window_pages:
                raise ValueError(f"without a window there are no window pages, not {self.num_window_pages}")
        elif self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        elif self.num_window_pages < self.window_reach:
            raise ValueError(
                f"num_window_pages is {self.num_window_pages}, but one request with a window of "
                f"{self.window} tokens needs {self.window_reach}"
            )

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def window_reach(self) -> int:
        """Window pages that a running request must find at any time; 0 without a window.

        A step of `n` tokens may use `n // page_size` more. See `window_reach`.
        """
        if self.window is None:
            return 0
        return min(window_reach(self.window, self.page_size), self.num_pages)

    def window_start(self, position: int) -> int:
        """The first page that the computation of `position`, and of all after it, looks back to."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size


def window_reach(window: int, page_size: int) -> int:
    """Pages that `window` consecutive positions touch at most, and one: a step of `n` tokens looks back from
    its first one, and its other `n - 1` touch up to `n // page_size + 1` pages more.
    """
    return (window + page_size - 2) // page_size + 2
