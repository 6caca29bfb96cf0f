"""Calls that are not as they should be: nothing of them is lost, and none is claimed that is not there."""

import json

import pytest

from moebius_gateway.text.parsing.events import ContentDelta
from moebius_gateway.text.parsing.registry import by_name, names
from moebius_gateway.text.parsing.stream import parser_for
from tests.gateway.parsing.reading import TOOLS, Answer, Call, read

NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def all_ways(family: str, text: str, **how: bool) -> Answer:
    """However it is cut."""
    whole = read(family, [text], **how)
    assert read(family, list(text), **how) == whole
    return whole


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "five"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{} {}"}</tool_call>'),
        ("hermes", "The tag <tool_call> begins a call, </tool_call> ends it."),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "now"'),
        ("hermes", "text <tool_cal"),
        ("hermes", "text <"),
        ("qwen3_coder", "<tool_call>\n<parameter=city>\nKöln\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<function=two words>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\nno tags\n</function>\n</tool_call>"),
        ("llama3", '{"name": "get_weather"'),
        ("llama3", '{"name": "Bob", "age": 3}'),
        ("llama3", '{"name": "now", "note": {}}'),
        ("llama3", '  {"answer": {"name": "now", "parameters": {}}}'),
        ("llama3", '["now"]'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]The weather is fine."),
        ("mistral", "[TOOL_CALLS]now[ARGS]none"),
        ("mistral", "[TOOL_CALLS]" + "x" * 200),
        ("deepseek", "<｜tool▁calls▁begin｜>now<｜tool▁calls▁end｜>"),
        ("glm", "Use <tool_call> to call, or <tool_call>name</tool_cal>."),
        ("gemma4", "<|tool_call>now()"),
        ("minimax", "<minimax:tool_call>\nnow\n</minimax:tool_call>"),
    ],
)
def test_what_is_no_call_is_text(family: str, text: str) -> None:
    assert all_ways(family, text) == Answer(content=text)


def test_text_follows_a_call_that_became_unreadable() -> None:
    """What was given on cannot be taken back; it has no end, and all of its text is there."""
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": Köln}}</tool_call>'
    answer = all_ways("hermes", f"I look.\n{broken}\n{NOW}")
    assert answer.content == f"I look.{broken}"
    assert answer.calls == [Call("get_weather", '{"city": '), Call("now", "{}", ended=True)]


def test_a_call_without_a_closing_marker_is_whole_when_its_arguments_are() -> None:
    for tail in ("", "\n", "}", "</tool_call>", "}</tool_call>", "}}\n</tool_call>"):
        text = '<tool_call>{"name": "now", "arguments": {}' + tail
        assert all_ways("hermes", text) == Answer(calls=[Call("now", "{}", ended=True)]), tail


def test_an_opening_marker_in_place_of_a_call() -> None:
    answer = all_ways("hermes", f"<tool_call>\n{NOW}")
    assert answer == Answer(content="<tool_call>\n", calls=[Call("now", "{}", ended=True)]) or (
        answer == Answer(content="<tool_call>", calls=[Call("now", "{}", ended=True)])
    )


def test_text_between_and_behind_calls_is_content() -> None:
    answer = all_ways("hermes", f"a\n{NOW}\nb {NOW} c\n\n{NOW}\n")
    assert answer.content == "ab  c"
    assert len(answer.calls) == 3


def test_calls_inside_of_reasoning_are_calls_and_the_thought_goes_on() -> None:
    answer = all_ways("hermes", f"<think>\nI call.\n{NOW}\nand think\n</think>\nDone.")
    assert answer == Answer("I call.and think", "Done.", [Call("now", "{}", ended=True)])


def test_a_thought_about_the_marker_stays_a_thought() -> None:
    thought = "I could write <tool_call> here, or <think>."
    assert all_ways("hermes", f"<think>{thought}</think>ok") == Answer(thought, "ok")


def test_reasoning_that_never_ends() -> None:
    for truncated in (False, True):
        answer = all_ways("hermes", "on and on </thin", started_in_reasoning=True, truncated=truncated)
        assert answer == Answer(reasoning="on and on </thin")


def test_a_second_opening_of_reasoning_is_no_text() -> None:
    answer = all_ways("think", "<think>\nhm\n</think>\n\nok", started_in_reasoning=True)
    assert answer == Answer("hm", "ok")


def test_a_closing_marker_where_no_reasoning_was_is_no_text() -> None:
    assert all_ways("think", "\n</think>\n\nok") == Answer(content="ok")


def test_a_family_without_reasoning_cannot_start_in_it() -> None:
    assert all_ways("plain", "ok", started_in_reasoning=True) == Answer(content="ok")


def test_interleaved_thoughts() -> None:
    answer = all_ways("hermes", f"<think>a</think>{NOW}<think>b</think>c")
    assert answer == Answer("ab", "c", [Call("now", "{}", ended=True)])


def test_a_bare_call_behind_reasoning() -> None:
    call = '{"name": "now", "parameters": {}}'
    answer = all_ways("llama3", f"<think>\nhm\n</think>\n\n{call}")
    assert answer == Answer("hm", calls=[Call("now", "{}", ended=True)])
    assert all_ways("llama3", f"hm</think>{call}", started_in_reasoning=True) == answer
    assert all_ways("llama3", f"Text. {call}") == Answer(content=f"Text. {call}")


def test_white_space_of_an_answer_without_markers_is_kept() -> None:
    for family in names():
        assert all_ways(family, "\n\n  text \n\n") == Answer(content="\n\n  text \n\n")


def test_a_closing_marker_that_comes_late_is_dropped_once() -> None:
    text = '<tool_call>{"name": "now"} Done.</tool_call> </tool_call> is a tag.'
    answer = all_ways("hermes", text)
    assert answer == Answer(content="Done. </tool_call> is a tag.", calls=[Call("now", "{}", ended=True)])


def test_names_that_are_no_tools_are_given_on() -> None:
    answer = all_ways("hermes", '<tool_call>{"name": "rm", "arguments": {"x": 1}}</tool_call>')
    assert answer.whole_calls() == [("rm", {"x": 1})]


@pytest.mark.parametrize("text", [NOW, '{"name": "now", "parameters": {}}', "[TOOL_CALLS]now[ARGS]{}"])
@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_without_tools_calls_are_text(family: str, text: str) -> None:
    assert read(family, [text], tools={}) == Answer(content=text)


def test_harmony_shows_no_markers_even_without_tools() -> None:
    text = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    assert read("harmony", [text], tools={}) == Answer(content="{}")
    builtin = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert read("harmony", [builtin]) == Answer(reasoning="print(1)")


def test_cut_short_in_the_arguments() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Kö'
    answer = all_ways("hermes", text, truncated=True)
    assert answer == Answer(calls=[Call("get_weather", '{"city": "Kö')])
    assert read("hermes", [text]).content == text  # it ended by itself: not a call


def test_cut_short_before_the_name_is_known() -> None:
    for text in ("<tool_call>", '<tool_call>{"name": "get_w'):
        assert all_ways("hermes", f"I look.\n{text}", truncated=True).content.rstrip() == "I look."
    bare = '{"name": "get_w'
    assert all_ways("llama3", bare, truncated=True) == Answer(content=bare)  # may have been an answer


def test_what_has_one_meaning_is_mended() -> None:
    arguments = '{"city": "a\nb\t\\d\x01\\\'", "hourly": True, "limits": None, "days": 1}'
    answer = all_ways("mistral", f"[TOOL_CALLS]get_weather[ARGS]{arguments}")
    assert answer.whole_calls() == [
        ("get_weather", {"city": "a\nb\t\\d\x01\\'", "hourly": True, "limits": None, "days": 1})
    ]


def test_values_that_are_not_of_their_type_stay_text() -> None:
    text = (
        "<tool_call><function=get_weather><parameter=days>soon</parameter><parameter=limits>{1}</parameter>"
        "<parameter=unknown>null</parameter><parameter=city>5</parameter></function></tool_call>"
    )
    arguments = {"days": "soon", "limits": "{1}", "unknown": None, "city": "5"}
    assert all_ways("qwen3_coder", text).whole_calls() == [("get_weather", arguments)]


def test_a_string_is_streamed_and_only_what_may_be_its_end_is_held_back() -> None:
    parser = parser_for(by_name("qwen3_coder"), TOOLS, started_in_reasoning=False)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nKö")
    [delta] = parser.feed("ln </par\n")
    assert getattr(delta, "delta", None) == "ln </par"
    [delta] = parser.feed("\nx</parameter")
    assert getattr(delta, "delta", None) == "\\n\\nx"


def test_only_what_may_become_a_marker_is_held_back() -> None:
    parser = parser_for(by_name("hermes"), TOOLS, started_in_reasoning=False)
    assert parser.feed("a < b <to") == [ContentDelta("a < b ")]
    assert parser.feed("ol_cow") == [ContentDelta("<tool_cow")]
    assert parser.feed("<think>") == [ContentDelta("<think>")]
    assert parser.feed("\n") == []
    assert parser.feed(".") == [ContentDelta("\n.")]


def test_ids_of_mistral_calls_are_what_its_template_demands() -> None:
    parser = parser_for(by_name("mistral"), TOOLS, started_in_reasoning=False)
    start = parser.feed("[TOOL_CALLS]now[ARGS]{}")[0]
    assert len(start.id) == 9  # type: ignore[union-attr]
    assert start.id.isalnum()  # type: ignore[union-attr]


def test_deep_nests() -> None:
    nested = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    for family, text in (
        ("mistral", f"[TOOL_CALLS]now[ARGS]{nested}"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + json.dumps(nested) + "}</tool_call>"),
        ("qwen3_coder", f"<function=now><parameter=x>{nested}</parameter></function>"),
        ("gemma4", "<|tool_call>call:now{a:" + "[" * 5000),
    ):
        read(family, [text])  # does not fail
