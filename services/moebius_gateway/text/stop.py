"""Stop strings, found across tokens: what could become one is held back, what cannot is let go at once."""

from collections.abc import Sequence


class StopMatcher:
    """Looks for the first of several strings in a text that comes in pieces.

    The text ends at the first character that completes a stop string, and before the longest stop string that
    ends there; where the pieces were cut makes no difference. Knuth-Morris-Pratt for each string, so the cost
    of a character is constant whatever the strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops if stop]
        # For each string: how many of its characters the text so far ends with.
        self._matched = [0] * len(self._stops)
        self._held = ""
        # The one that ended the text.
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that can be delivered, and whether a stop string was completed, which ends it."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            longest = ""
            for i, (stop, borders) in enumerate(self._stops):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                matched += stop[matched] == char
                self._matched[i] = matched
                if matched == len(stop) > len(longest):
                    longest = stop
            if longest:
                self.found = longest
                return buffer[: position - len(longest)], True
        held = max(self._matched)
        deliverable = buffer[: len(buffer) - held]
        self._held = buffer[len(buffer) - held :]
        return deliverable, False

    def flush(self) -> str:
        """The end of the text, or of a part of it: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
