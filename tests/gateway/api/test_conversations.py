"""Conversations in the spelling that each template understands; reasoning, as far as it can be asked for."""

from typing import Any

import pytest

from moebius_gateway.text.conversation import Conversation, Message, Tool, ToolCall
from moebius_gateway.text.errors import PromptError
from moebius_gateway.text.template import ChatTemplate

CALLED = Message("assistant", "", tool_calls=(ToolCall("call_0123", "f", '{"a": 1}'),))
ANSWERED = (Message("user", "Hi"), CALLED, Message("tool", "sun", tool_call_id="call_0123"))
REFUSES_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}: {{ m.content }}]{% endfor %}"
)


def render(source: str, *messages: Message, **more: Any) -> str:
    return ChatTemplate(source, {}).render(Conversation(messages, **more))


def test_arguments_are_an_object_or_else_the_text_that_they_are() -> None:
    call = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ %s }}{% endfor %}{% endfor %}"
    assert render(call.replace("%s", "c.function.arguments.a"), *ANSWERED) == "1"
    assert render(call.replace("%s", "'x' + c.function.arguments"), *ANSWERED) == 'x{"a": 1}'
    cut = Message("assistant", "", tool_calls=(ToolCall("1", "f", '{"a": '),))
    assert render(call.replace("%s", "c.function.arguments"), cut) == '{"a": '


def test_a_tools_answer_has_the_tools_name() -> None:
    assert render("{{ messages[-1].name }} {{ messages[-1].tool_call_id }}", *ANSWERED) == "f call_0123"


def test_ids_that_a_template_refuses_are_shortened_alike() -> None:
    source = (
        "{% set id = messages[1].tool_calls[0].id %}"
        "{% if id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
        "{{ id }} {{ messages[2].tool_call_id }}"
    )
    one, other = render(source, *ANSWERED).split()
    assert one == other
    assert one.isalnum()


def test_reasoning_is_where_the_template_looks_for_it() -> None:
    thought = Message("assistant", "x", reasoning="Hm")
    for key in ("reasoning_content", "thinking"):
        assert render(f"{{{{ messages[0].{key} }}}}", thought) == "Hm"
    assert render("{{ messages[0] | tojson }}", thought) == '{"role": "assistant", "content": "x"}'


def test_a_system_message_in_the_middle_is_no_error() -> None:
    late = (Message("user", "Hi"), Message("system", "one"), Message("developer", "two"))
    assert render(REFUSES_LATE_SYSTEM, *late) == "[system: one\n\ntwo][user: Hi]"
    first = (Message("system", "one"), Message("user", "Hi"))
    assert render(REFUSES_LATE_SYSTEM, *first) == "[system: one][user: Hi]"
    with pytest.raises(PromptError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}", *late)


def test_tools_are_what_templates_expect() -> None:
    tool = Tool("f", "does f", {"type": "object", "properties": {}})
    assert render("{{ tools | tojson }}", tools=(tool,)) == (
        '[{"type": "function", "function": {"name": "f", "description": "does f", '
        '"parameters": {"type": "object", "properties": {}}}}]'
    )
    assert render("{{ tools is none }}") == "True"
    with pytest.raises(PromptError, match="no place for tools") as refused:
        render("{{ messages }}", tools=(tool,))
    assert refused.value.param == "tools"


EFFORT = "{{ reasoning_effort }} reasoning"
SWITCH = "<think>{{ enable_thinking }}"
ALWAYS = "<think>"
NEVER = "plain"
NONE_TOO = "{% if reasoning_effort == 'none' %}off{% else %}{{ reasoning_effort }} reasoning{% endif %}"


@pytest.mark.parametrize(
    ("source", "asked", "rendered"),
    [
        (EFFORT, {"effort": "high"}, "high reasoning"),
        (EFFORT, {"effort": "minimal"}, None),
        (EFFORT, {"effort": "none"}, None),
        (EFFORT, {"thinking": True}, " reasoning"),
        (EFFORT, {"thinking": False}, None),
        (NONE_TOO, {"effort": "none"}, "off"),
        (NONE_TOO, {"thinking": False}, "off"),
        (SWITCH, {"effort": "none"}, "<think>False"),
        (SWITCH, {"effort": "low"}, "<think>True"),
        (SWITCH, {"thinking": False}, "<think>False"),
        (SWITCH, {}, "<think>"),
        (ALWAYS, {"thinking": True}, "<think>"),
        (ALWAYS, {"thinking": False}, None),
        (ALWAYS, {"effort": "high"}, None),
        (NEVER, {"thinking": False}, "plain"),
        (NEVER, {"effort": "none"}, "plain"),
        (NEVER, {"thinking": True}, None),
        (NEVER, {"effort": "high"}, None),
    ],
)
def test_reasoning_is_asked_for_or_refused(source: str, asked: dict[str, Any], rendered: str | None) -> None:
    if rendered is not None:
        assert render(source, **asked) == rendered
        return
    with pytest.raises(PromptError) as refused:
        render(source, **asked)
    assert refused.value.param == ("reasoning_effort" if "effort" in asked else "thinking")


def test_variables_of_the_client() -> None:
    assert render("{{ speed }}", template_variables={"speed": 3}) == "3"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "unknown"):
        template = ChatTemplate("{{ speed }}{{ messages }}{{ tools }}{{ bos_token }}", {"bos_token": "x"})
        with pytest.raises(PromptError) as refused:
            template.render(Conversation((), template_variables={name: 1}))
        assert refused.value.param == f"chat_template_kwargs.{name}"
