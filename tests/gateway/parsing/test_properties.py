"""Random texts that look like formats: nothing raises, nothing is lost, and cuts make no difference."""

import itertools
import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_gateway.text.parsing.json_scanner import JsonScanner
from moebius_gateway.text.parsing.registry import FAMILIES, by_name, names
from moebius_gateway.text.parsing.stream import parser_for
from tests.gateway.parsing.goldens import GOLDENS
from tests.gateway.parsing.reading import TOOLS, Answer, read

FAMILY = pytest.mark.parametrize("family", names())


def fragments(family: str) -> list[str]:
    """Markers of the family, whole and torn, and what stands between them."""
    found = {
        "\n",
        " ",
        "x",
        "🙂",
        "<",
        "[",
        "{",
        "}",
        "{}",
        '"',
        ":",
        ",",
        "name",
        '{"name": "now", "arguments": ',
    }
    for golden in GOLDENS:
        if golden.family == family:
            found |= set(re.findall(r"</?[^<>]*>|\[[A-Z_]+\]|[\w]+|\W", golden.text))
            found |= {golden.text[i : i + 12] for i in range(0, len(golden.text), 5)}
            found.add(golden.text)
    return sorted(found)


TEXTS = {family: st.lists(st.sampled_from(fragments(family)), max_size=25) for family in names()}


@FAMILY
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_cuts_make_no_difference(family: str, data: st.DataObject) -> None:
    text = "".join(data.draw(TEXTS[family]))
    started, truncated = data.draw(st.booleans()), data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]

    def how(pieces: list[str]) -> Answer:
        return read(family, pieces, started_in_reasoning=started, truncated=truncated)

    assert how(pieces) == how([text]) == how(list(text))


@FAMILY
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_words_are_not_lost(family: str, data: st.DataObject) -> None:
    """Numbered words among markers and torn markers: each word is found in what is delivered."""
    spec = by_name(family)
    markers = [rule.open for rule in spec.rules] + [close for rule in spec.rules for close in rule.close]
    torn = [marker[: i + 1] for marker in [*markers, *spec.dropped] for i in range(0, len(marker), 3)]
    noise = data.draw(st.lists(st.sampled_from([*torn, *spec.dropped, "\n", " ", "{", '{"name": "now"'])))
    text = "".join(f" w{i}w {piece}" for i, piece in enumerate(noise))
    answer = read(family, [text])
    delivered = answer.reasoning + answer.content
    assert all(f" w{i}w " in delivered for i in range(len(noise)))


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
        max_leaves=12,
    ),
    st.booleans(),
    st.data(),
)
def test_json_is_passed_on_as_it_is(value: object, ascii: bool, data: st.DataObject) -> None:
    text = json.dumps([value], ensure_ascii=ascii, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(0, len(text)))
    scanner = JsonScanner()
    first, out = scanner.read(text[:cut], 0)
    end, more = scanner.read(text[cut:] + "}", 0)
    assert first == cut
    assert (out + more, end, scanner.done) == (text, len(text) - cut, True)


@settings(max_examples=300, deadline=None)
@given(st.text('{}[]",:0123456789.eE+-truefalsn \\u', max_size=20))
def test_what_is_done_is_json(text: str) -> None:
    """Python's own reader is the judge, but for what is mended."""
    scanner = JsonScanner()
    _, out = scanner.read(text + " ", 0)
    try:
        json.loads(text)
    except ValueError:
        if scanner.done:
            json.loads(out)
    else:
        assert scanner.done
        assert not scanner.failed
        assert json.loads(out) == json.loads(text)


LONG = {
    "content": ("hermes", "", "The < sign, and <tool is no marker.\n"),
    "reasoning": ("hermes", "<think>", "The < sign, and </think is no marker.\n"),
    "json": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "', "text \\n < more, "),
    "json before its name": ("hermes", '<tool_call>{"arguments": {"a": "', "text \\n < more, "),
    "number": ("mistral", '[TOOL_CALLS]now[ARGS]{"a": ', "1234567890"),
    "string value": ("qwen3_coder", "<function=get_weather><parameter=city>", "text </param < more\n"),
    "other value": ("qwen3_coder", "<function=get_weather><parameter=limits>", "[1, 2], </para"),
    "quoted": ("gemma4", '<|tool_call>call:now{a:<|"|>', 'text <|" < more '),
    "line feeds": ("hermes", "", "\n"),
    "blanks": ("hermes", "<tool_call>", " "),
    "openers": ("hermes", "", "<tool_call>"),
    "openers in strings": ("hermes", '<tool_call>{"arguments": "', "<tool_call>{'arguments': "),
    "calls": ("hermes", "", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    "names": ("mistral", "", "[TOOL_CALLS]now"),
    "channels": ("harmony", "", "<|channel|>analysis<|message|>a<|end|><|start|>assistant"),
}


@pytest.mark.timed
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("what", LONG)
def test_cost_is_linear(what: str) -> None:
    """100,000 characters, one at a time: no piece is dearer because of what came before."""
    family, head, repeated = LONG[what]

    def seconds(length: int) -> float:
        text = head + (repeated * (length // len(repeated) + 1))[:length]
        parser = parser_for(by_name(family), TOOLS, started_in_reasoning=False)
        started = time.process_time()
        for char in text:
            parser.feed(char)
        parser.finish(truncated=False)
        return time.process_time() - started

    seconds(1000)  # compiles
    short, long = min(seconds(10_000) for _ in range(3)), seconds(100_000)
    assert long < 10 * short * 3


def test_no_marker_begins_another() -> None:
    """Else the shorter one would be found in the longer."""
    for spec in FAMILIES:
        markers = {rule.open for rule in spec.rules} | set(spec.dropped)
        for rule in spec.rules:
            markers |= set(rule.close)
        for one, other in itertools.permutations(markers, 2):
            assert not other.startswith(one)
