"""What tests ask of every client: a tool or two, and what the scripted model makes of them."""

from typing import Any

WORDS = "Grüße aus Köln 🙂"
SAID = f"You said: {WORDS}"
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
# An agent's loop over five turns: a call each, then the answer.
STEPS = ("search", "read", "summarise", "translate")
LOOP_SAID = "Done: search(go), read(search(go)), summarise(read(search(go))), " + (
    "translate(summarise(read(search(go))))."
)


def run_tool(name: str, text: str) -> str:
    return f"{name}({text})"


def function(name: str, **more: Any) -> dict[str, Any]:
    """Of chat completions."""
    return {"type": "function", "function": {"name": name, "description": name, "parameters": TEXT, **more}}


def user(text: str = WORDS) -> list[Any]:
    return [{"role": "user", "content": text}]
