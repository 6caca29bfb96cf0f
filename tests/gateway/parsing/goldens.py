"""What models of each family write, and what it says. The forms are those of the chat templates."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Golden:
    title: str
    family: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    started_in_reasoning: bool = False


COLOGNE = ("get_weather", {"city": "Köln", "days": 3})
ESCAPED = ("get_weather", {"city": 'a "b" \\ c\n🙂', "days": 1})
NOW: tuple[str, dict[str, Any]] = ("now", {})

GOLDENS = (
    Golden(
        "two calls behind reasoning and text",
        "hermes",
        "<think>\nThe user asks for 🌧?\n</think>\n\nI will look.\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "The user asks for 🌧?",
        "I will look.",
        (COLOGNE, NOW),
    ),
    Golden(
        "escapes, and arguments before the name",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "a \\"b\\" \\\\ c\\n\\ud83d\\ude42", "days": 1}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"city": "Köln", "days": 3}, "name": "get_weather"}</tool_call>\nDone.',
        content="Done.",
        calls=(ESCAPED, COLOGNE),
    ),
    Golden(
        "no arguments at all, a list of calls, arguments in a string",
        "hermes",
        '<tool_call>{"name": "now"}</tool_call>'
        '<tool_call>[{"name": "now", "arguments": null}, {"name": "now", "arguments": {}}]</tool_call>'
        '<tool_call>{"name": "get_weather", '
        '"arguments": "{\\"city\\": \\"Köln\\", \\"days\\": 3}"}</tool_call>',
        calls=(NOW, NOW, NOW, COLOGNE),
    ),
    Golden(
        "the prompt opened the reasoning",
        "hermes",
        "Short thought.\n</think>\n\n  Indented answer.\n",
        "Short thought.",
        "  Indented answer.\n",
        started_in_reasoning=True,
    ),
    Golden(
        "thinking that was switched off in the prompt",
        "hermes",
        "The tag <think> opens thoughts, </think> closes them; 3 < 4.",
        content="The tag <think> opens thoughts, </think> closes them; 3 < 4.",
    ),
    Golden(
        "values of all types, and text of several lines",
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        'Köln\n\n<b>"x"\\</b>\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=limits>\n{"max": [1, 2.5]}\n</parameter>\n<parameter=kinds>\n["rain"]\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        content="I look.",
        calls=(
            (
                "get_weather",
                {
                    "city": 'Köln\n\n<b>"x"\\</b>',
                    "days": 3,
                    "hourly": True,
                    "limits": {"max": [1, 2.5]},
                    "kinds": ["rain"],
                },
            ),
            NOW,
        ),
    ),
    Golden(
        "the outer tag forgotten; an empty value",
        "qwen3_coder",
        "<think>\nhm\n</think>\n\n<function=get_weather>\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>",
        "hm",
        calls=(("get_weather", {"city": ""}),),
    ),
    Golden(
        "one bare call",
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Köln", "days": 3}}',
        calls=(COLOGNE,),
    ),
    Golden(
        "two calls behind a token",
        "llama3",
        '<|python_tag|>{"type": "function", "name": "get_weather", '
        '"parameters": {"city": "Köln", "days": 3}}; '
        '{"name": "now", "parameters": {}}',
        calls=(COLOGNE, NOW),
    ),
    Golden(
        "an answer in JSON that is no call",
        "llama3",
        '{"name": "Bob", "parameters": {"age": 7}}',
        content='{"name": "Bob", "parameters": {"age": 7}}',
    ),
    Golden(
        "a list",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}, '
        '{"name": "now", "arguments": {}, "id": "AbCdEf123"}]',
        calls=(COLOGNE, NOW),
    ),
    Golden(
        "names before arguments",
        "mistral",
        "[THINK]Let me [see].[/THINK]I look."
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln", "days": 3}'
        "[TOOL_CALLS]now[CALL_ID]AbCdEf123[ARGS]{}"
        "[TOOL_CALLS]now{}",
        "Let me [see].",
        "I look.",
        (COLOGNE, NOW, NOW),
    ),
    Golden(
        "V3: fenced",
        "deepseek",
        "<think>\nhm\n</think>\n\nI look.<｜tool▁calls▁begin｜>"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Köln", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "hm",
        "I look.",
        (COLOGNE, NOW),
    ),
    Golden(
        "V3.1: not fenced; a tool that is called function",
        "deepseek",
        "hm</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Köln", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "hm",
        "I look.",
        (COLOGNE, ("function", {})),
        started_in_reasoning=True,
    ),
    Golden(
        "V3.2: tags that say whether a value is a string",
        "deepseek_dsml",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        content="I look.",
        calls=(COLOGNE, NOW),
    ),
    Golden(
        "V4",
        "deepseek_dsml",
        'hm</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="other">\n'
        '<｜DSML｜parameter name="a" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">["<", null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        "hm",
        calls=(("other", {"a": "5", "b": ["<", None]}),),
        started_in_reasoning=True,
    ),
    Golden(
        "4.6: on lines",
        "glm",
        "\n<think>hm</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        "hm",
        "I look.",
        (COLOGNE, NOW),
    ),
    Golden(
        "4.7: on one line",
        "glm",
        "hm</think>I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        "hm",
        "I look.",
        (COLOGNE, NOW),
        started_in_reasoning=True,
    ),
    Golden(
        "a call behind a preamble",
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city":"Köln","days":3}<|call|>',
        "Need the weather.",
        "I look.",
        (COLOGNE,),
    ),
    Golden(
        "recipients before channels, as in the prompt",
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Köln","days":3}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        calls=(COLOGNE, NOW),
    ),
    Golden(
        "an answer",
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4 < 5.<|return|>",
        "Easy.",
        "4 < 5.",
    ),
    Golden(
        "a thought and two calls",
        "gemma4",
        "<|channel>thought\nhm\n<channel|>"
        '<|tool_call>call:get_weather{city:<|"|>Köln "x", {y}<|"|>,days:3,hourly:true,kinds:[<|"|>rain<|"|>],'
        "limits:{max:[1,2.5],min:None,at:{}}}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>",
        "hm",
        calls=(
            (
                "get_weather",
                {
                    "city": 'Köln "x", {y}',
                    "days": 3,
                    "hourly": True,
                    "kinds": ["rain"],
                    "limits": {"max": [1, 2.5], "min": None, "at": {}},
                },
            ),
            NOW,
        ),
    ),
    Golden("an answer", "gemma4", "<|channel>thought\n<channel|>Hello.", content="Hello."),
    Golden(
        "two invocations",
        "minimax",
        'hm\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Köln</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "hm",
        "I look.",
        (COLOGNE, NOW),
        started_in_reasoning=True,
    ),
    Golden(
        "a call a line",
        "minimax_m1",
        "<think>\nhm\n</think>\n\n<tool_calls>\n"
        '{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>',
        "hm",
        calls=(COLOGNE, NOW),
    ),
    Golden(
        "tags in tags",
        "minimax_m3",
        "<mm:think>hm</mm:think>I look.\n"
        '|<tool_call>\n|<invoke name="get_weather">|<city>Köln <b>|</city>|<days>3|</days>'
        "|<hourly>true|</hourly>"
        "|<kinds>|<item>5|</item>|<item>rain|</item>|</kinds>|<limits>|<max>|<item>1|</item>|<item>|<a>2.5|</a>"
        '|</item>|</max>|<item>x|</item>|</limits>|</invoke>\n|<invoke name="get_weather">|<kinds>|</kinds>'
        '|<limits>|</limits>|<city>|</city>|</invoke>\n|<invoke name="now">|</invoke>\n|</tool_call>'.replace(
            "|", "]<]minimax[>["
        ),
        "hm",
        "I look.",
        (
            (
                "get_weather",
                {
                    "city": "Köln <b>",
                    "days": 3,
                    "hourly": True,
                    "kinds": ["5", "rain"],
                    "limits": {"max": [1, {"a": 2.5}], "item": "x"},
                },
            ),
            ("get_weather", {"kinds": [], "limits": {}, "city": ""}),
            NOW,
        ),
    ),
    Golden(
        "a section of two calls",
        "kimi",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Köln", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        content="I look.",
        calls=(COLOGNE, NOW),
    ),
    Golden(
        "a thought that the model opens itself",
        "think",
        "<think>\na < b\n</think>\n\nAn <b>answer</b>.",
        "a < b",
        "An <b>answer</b>.",
    ),
    Golden(
        "text",
        "plain",
        "\n<think> [TOOL_CALLS] <tool_call>\n",
        content="\n<think> [TOOL_CALLS] <tool_call>\n",
    ),
)
