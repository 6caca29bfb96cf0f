"""What each family's models write is read in full, wherever it is cut."""

import itertools
import random

import pytest

from moebius_gateway.text.parsing.registry import by_name, names
from moebius_gateway.text.parsing.stream import parser_for
from tests.gateway.parsing.goldens import COLOGNE, GOLDENS, Golden
from tests.gateway.parsing.reading import TOOLS, Answer, answer_of, read

# What may begin a call or a channel; of each family.
STARTS = {
    spec.name: [
        *(rule.open for rule in spec.rules),
        *(close for rule in spec.rules for form in rule.forms for close in getattr(form, "close", ())),
        *spec.dropped,
        *('{"name": "get_weather", "parameters": ', '{"name": "Bob', " to=functions.get_weather<|channel|>"),
    ]
    for spec in map(by_name, names())
}

EACH = pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: f"{golden.family}: {golden.title}")


def parts(golden: Golden, pieces: list[str], **how: bool) -> Answer:
    return read(golden.family, pieces, started_in_reasoning=golden.started_in_reasoning, **how)


def test_each_family_has_a_golden() -> None:
    assert {golden.family for golden in GOLDENS} == set(names())


@EACH
def test_the_whole(golden: Golden) -> None:
    answer = parts(golden, [golden.text])
    assert answer.reasoning == golden.reasoning
    assert answer.content == golden.content
    assert answer.whole_calls() == list(golden.calls)
    assert all(call.ended for call in answer.calls)


@EACH
def test_cut_at_every_character(golden: Golden) -> None:
    whole = parts(golden, [golden.text])
    for cut in range(len(golden.text) + 1):
        assert parts(golden, [golden.text[:cut], golden.text[cut:]]) == whole
    assert parts(golden, list(golden.text)) == whole


@EACH
def test_cut_at_several_places(golden: Golden) -> None:
    whole = parts(golden, [golden.text])
    draw = random.Random(golden.text)
    for _ in range(100):
        cuts = sorted(draw.choices(range(len(golden.text) + 1), k=draw.randrange(2, 9)))
        pieces = [golden.text[i:j] for i, j in itertools.pairwise([0, *cuts, len(golden.text)])]
        assert parts(golden, pieces) == whole


@EACH
def test_cut_short_at_every_character(golden: Golden) -> None:
    """What was said before the limit stays, and no call is claimed that was not whole.

    Nothing else is said; only of a marker (or of a bare call) the beginning, since it could have been text.
    """
    for end in range(len(golden.text)):
        answer = parts(golden, [golden.text[:end]], truncated=True)
        assert answer.whole_calls() == list(golden.calls[: len(answer.whole_calls())])
        assert all(call.ended for call in answer.calls[:-1])
        for said, whole in ((answer.reasoning, golden.reasoning), (answer.content, golden.content)):
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(said, whole, strict=False))
            rest = said[len(list(same)) :].strip("\n")
            assert not rest or any(start.startswith(rest) for start in STARTS[golden.family]), said


@pytest.mark.parametrize(
    "golden",
    [golden for golden in GOLDENS if golden.calls and golden.calls[0] == COLOGNE],
    ids=lambda golden: f"{golden.family}: {golden.title}",
)
def test_strings_in_arguments_come_as_they_are_written(golden: Golden) -> None:
    parser = parser_for(by_name(golden.family), TOOLS, started_in_reasoning=golden.started_in_reasoning)
    [call] = answer_of(parser.feed(golden.text[: golden.text.index("Köln") + 3])).calls
    assert call.arguments.endswith('"Köl')
