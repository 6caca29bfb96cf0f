"""Which pages of the KV cache are free. A page is a number; what it holds is the runner's affair."""


class PagePool:
    """Hands out pages `0 .. num_pages - 1`, each to one owner at a time: a request or the prefix tree."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page. IndexError when there is none: callers look at `free` before."""
        page = self._free.pop()
        self._taken[page] = True
        return page

    def give_back(self, page: int) -> None:
        """Frees `page`. ValueError when it is free already: two owners would write to it later."""
        if not self._taken[page]:
            raise ValueError(f"page {page} is freed twice")
        self._taken[page] = False
        self._free.append(page)
