"""Stop strings: the same result however the text is cut, and nothing held back that could have gone."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moebius_gateway.text.stop import StopMatcher

SMALL_TEXTS = st.text("ab🙂", max_size=24)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4)


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    delivered = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        delivered += text
        if stopped:
            return delivered, True
    return delivered + matcher.flush(), False


def oracle(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """By definition: the first position at which a stop string ends, and the longest that ends there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(STOPS, SMALL_TEXTS, st.lists(st.integers(0, 24), max_size=6))
@example(["aab"], "aaab", [1, 2, 3])
@example(["abab", "ba"], "abab", [3])
def test_the_cuts_make_no_difference(stops: list[str], text: str, cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert run(stops, pieces) == run(stops, list(text)) == oracle(stops, text)


@settings(max_examples=500, deadline=None)
@given(STOPS, SMALL_TEXTS)
def test_only_what_may_become_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    seen = delivered = ""
    for char in text:
        seen += char
        piece, stopped = matcher.push(char)
        delivered += piece
        if stopped:
            return
        held = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert delivered == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("pieces", "delivered"),
    [
        (["Hello wor", "ld<|e", "nd|> more"], "Hello world"),
        (["x<|en<|end|>"], "x<|en"),
        (["<|end|>"], ""),
    ],
)
def test_a_stop_string_across_pieces(pieces: list[str], delivered: str) -> None:
    assert run(["<|end|>"], pieces) == (delivered, True)


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopMatcher([]).push("text") == ("text", False)


def test_what_was_held_back_is_delivered_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.flush() == "EN"
