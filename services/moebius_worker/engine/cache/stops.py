"""Where in a text later ones will want to go on: what the caches keep is kept for these positions."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stops:
    """The ends of some pages of one request's text, none of which are beyond its prefill.

    `last`: the end of its last full page, where the next turn of a conversation goes on. `branch`: where it
    was seen to leave a text that others have gone on from; 0: nowhere. And the multiples of `interval` before
    these.
    """

    interval: int = 1
    last: int = 0
    branch: int = 0

    def next(self, position: int) -> int | None:
        """The first one after `position`; None if there is none."""
        ahead = [mark for mark in (self.branch, self.last) if mark > position]
        if not ahead:
            return None
        return min(*ahead, (position // self.interval + 1) * self.interval)

    def __contains__(self, position: int) -> bool:
        return position > 0 and self.next(position - 1) == position


def stops_of(length: int, page_size: int, interval: int, spare: int) -> Stops:
    """The stops of a prefill of `length` tokens, at least `interval` tokens and whole pages apart.

    `spare`: for so many positions things can be kept. One text has a quarter of them at most, so that it does
    not push out all others.
    """
    interval = max(interval, -(-length // max(1, spare // 4)))
    return Stops(
        interval=-(-interval // page_size) * page_size,
        last=(length - 1) // page_size * page_size,
    )
