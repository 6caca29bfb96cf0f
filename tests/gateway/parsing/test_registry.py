"""The family is chosen by what the chat template writes, then by special tokens and config, never by name."""

import pytest

from moebius_gateway.text.parsing.registry import by_name, detect, names, opens_reasoning, spelt_tokens

# The lines of each family's templates that write calls or explain them, shortened.
EXCERPTS = {
    "hermes": """{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {%- if '</think>' in content %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}""",
    "qwen3_coder": """{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
        {{- '<parameter=' + args_name + '>\\n' }}{{- '</function>\\n</tool_call>' }}{{- '<think>\\n' }}""",
    "llama3": """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument' }}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}""",
    "mistral": """{{- "[TOOL_CALLS]" + tool['function']['name'] + "[ARGS]" + arguments }}
        {{- '[THINK]' + block['thinking'] + '[/THINK]' }}{{- '[INST]' + message['content'] + '[/INST]' }}""",
    "deepseek": """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name}}
        {%- if '</think>' in content -%}{{'<｜Assistant｜><think>\\n'}}""",
    "deepseek_dsml": """{%- set dsml_token = '｜DSML｜' -%}{%- set thinking_start_token = '<think>' -%}
        {{- '\\n\\n<' + dsml_token + 'tool_calls>\\n' -}}""",
    "glm": """<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>
        {{- '</think>' if not enable_thinking else '<think>' -}}""",
    "harmony": """{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary " }}
        {{- "json<|message|>" }}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}""",
    "gemma4": """{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}
        {{- '<|tool_call>call:' + function['name'] + '{' -}}""",
    "minimax": """{%- set toolcall_begin_token   = '<minimax:tool_call>'         -%}
        {{- '<invoke name="' + tool_call.name + '">' }}{{- '<parameter name="' + k + '">' }}<think>""",
    "minimax_m1": """{{ '<beginning_of_sentence>ai name=assistant\\n<tool_calls>\\n' -}}
        {{ '{"name": "' + name + '", "arguments": ' + arguments | tojson + '}\\n' -}}""",
    "minimax_m3": """{%- set ns_token = ']<]minimax[>[' -%}
        {%- set toolcall_begin_token = ns_token ~ '<tool_call>' -%}
        {{ ns_token + '<invoke name="' + tool_call.name + '">' }}
        {%- set think_begin_token = '<mm:think>' -%}""",
    "kimi": """<|tool_calls_section_begin|><|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>
        <think>{{rc}}</think>""",
    "think": "{% set content = content.split('</think>')[-1] %}",
    "plain": "{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}",
}


def test_each_family_has_an_excerpt() -> None:
    assert sorted(EXCERPTS) == sorted(names())


@pytest.mark.parametrize("family", EXCERPTS)
def test_templates(family: str) -> None:
    misleading = {"_name_or_path": "Qwen3-Coder-gpt-oss-DeepSeek-R1", "model_type": "qwen3_moe"}
    assert detect(EXCERPTS[family], misleading, ()).name == family
    everything = ["[TOOL_CALLS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<｜tool▁calls▁begin｜>"]
    if family not in ("think", "plain"):  # a template that writes calls knows better than the vocabulary
        assert detect(EXCERPTS[family], {"model_type": "gpt_oss"}, everything).name == family


@pytest.mark.parametrize(
    ("tokens", "family"),
    [
        (["<s>", "[INST]", "[TOOL_CALLS]"], "mistral"),
        (["<|python_tag|>", "<|eom_id|>"], "llama3"),
        (["<|python_tag|>"], "plain"),
        (["<｜tool▁calls▁begin｜>"], "deepseek"),
        (["<|channel|>", "<|message|>"], "harmony"),
    ],
)
def test_special_tokens_where_the_template_says_nothing(tokens: list[str], family: str) -> None:
    assert detect("", {}, tokens).name == family
    assert detect(EXCERPTS["plain"], {}, tokens).name == family


def test_the_config_where_nothing_else_says() -> None:
    assert detect("", {"model_type": "gpt_oss"}, ()).name == "harmony"
    assert detect("", {"model_type": "deepseek_v32"}, ()).name == "deepseek_dsml"
    assert detect("", {"model_type": "llama", "_name_or_path": "gpt-oss"}, ()).name == "plain"
    assert detect("", {"model_type": ["odd"]}, ()).name == "plain"


def test_by_name() -> None:
    assert [by_name(name).name for name in names()] == names()
    assert len(set(names())) == len(names())
    with pytest.raises(ValueError, match="hermes"):
        by_name("qwen-7b")


@pytest.mark.parametrize(
    ("family", "prompt", "opens"),
    [
        ("hermes", "<|im_start|>assistant\n", False),
        ("hermes", "<|im_start|>assistant\n<think>\n", True),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("hermes", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("deepseek", "<｜Assistant｜><think></think>", False),
        ("deepseek", "<｜Assistant｜><think>", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("mistral", "[/INST][THINK]", True),
        ("harmony", "<|start|>assistant", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("plain", "<think>\n", False),
    ],
)
def test_prompts_that_open_reasoning(family: str, prompt: str, opens: bool) -> None:
    assert opens_reasoning(by_name(family), prompt) is opens


def test_special_tokens_that_markers_are_made_of() -> None:
    tokens = ["<s>", "</s>", "[INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
    assert spelt_tokens(by_name("mistral"), tokens) == set(tokens[3:])
    tokens = [
        "<|endoftext|>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|call|>",
        "<|end|>",
    ]
    assert spelt_tokens(by_name("harmony"), tokens) == set(tokens[1:])
    assert spelt_tokens(by_name("gemma4"), ["<bos>", '<|"|>', "<|tool_call>", "<tool_call|>"]) == {
        '<|"|>',
        "<|tool_call>",
        "<tool_call|>",
    }
    assert spelt_tokens(by_name("deepseek_dsml"), ["｜DSML｜", "<｜User｜>"]) == {"｜DSML｜"}
    assert spelt_tokens(by_name("plain"), ["<s>"]) == set()
