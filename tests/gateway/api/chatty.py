"""A model that reasons and calls tools: its chat template, and answers in its format."""

from typing import Any

from moebius_gateway.types import FinishReason, Generation, ModelInfo
from tests.gateway.http_server import Gateway, ScriptedBackend, tokenizer_files
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE

MODEL = ModelInfo(
    "org/chatty", "Qwen3MoeForCausalLM", "hash", 8192, VOCAB_SIZE, (EOS_TOKEN_ID,), 1_700_000_000
)
TEMPLATE = (
    '{% if tools %}<tools>{{ tools | tojson }}</tools> call in <tool_call> with "arguments"\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nThe weather?\n</think>\n\n"
SPOKEN = THOUGHT + "I look."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Hi"}]


def chatty_files() -> dict[str, bytes]:
    return tokenizer_files() | {"chat_template.jinja": TEMPLATE.encode()}


def tools(**more: Any) -> list[dict[str, Any]]:
    """Of chat completions."""
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    return [{"type": "function", "function": function | more}]


def says(backend: ScriptedBackend, text: str, finish: FinishReason = FinishReason.STOP) -> None:
    backend.script = lambda _: backend.say(text, finish=finish)


def last(gateway: Gateway) -> Generation:
    return gateway.backend.generations[-1]


def prompt(gateway: Gateway) -> str:
    return gateway.backend.text.decode(last(gateway).prompt_ids)
