"""Which pages of a cache are free. A page is a number; what it holds is the runner's affair."""


class PagePool:
    """Hands out `0 .. size - 1`, each to one owner at a time: a request or the prefix tree.

    State slots are handed out in the same way, and are called pages here.
    """

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._taken = bytearray(size)

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
