"""Schemas of answers and errors: what clients of each API rely on."""

from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
NAME: Json = {"type": "string", "minLength": 1}
COUNT: Json = {"type": "integer", "minimum": 0}
FLAG: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}


def _object(_optional: Json | None = None, /, **required: Json) -> Json:
    return {
        "type": "object",
        "properties": required | (_optional or {}),
        "required": sorted(required),
    }


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> Json:
    return {"const": value}


def _one_of(*values: str) -> Json:
    return {"enum": list(values)}


_USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
_CALL = _object(id=NAME, type=_const("function"), function=_object(name=NAME, arguments=TEXT))
_MODEL = _object(
    id=NAME,
    object=_const("model"),
    created=COUNT,
    owned_by=NAME,
    type=_const("model"),
    display_name=NAME,
    created_at=NAME,
    max_model_len=COUNT,
    architecture=TEXT,
)

ANSWERS: dict[str, Json] = {
    "Document": OBJECT,
    "ChatCompletionAnswer": _object(
        id=NAME,
        object=_const("chat.completion"),
        created=COUNT,
        model=NAME,
        usage=_USAGE,
        choices=_list(
            _object(
                index=COUNT,
                message=_object(
                    {"reasoning_content": TEXT, "tool_calls": _list(_CALL)},
                    role=_const("assistant"),
                    content=_or_null(TEXT),
                ),
                logprobs=_or_null(_object(content=_list(OBJECT))),
                finish_reason=_one_of("stop", "length", "tool_calls"),
            )
        ),
    ),
    "CompletionAnswer": _object(
        id=NAME,
        object=_const("text_completion"),
        created=COUNT,
        model=NAME,
        usage=_USAGE,
        choices=_list(
            _object(
                index=COUNT, text=TEXT, logprobs=_or_null(OBJECT), finish_reason=_one_of("stop", "length")
            )
        ),
    ),
    "ResponseAnswer": _object(
        id=NAME,
        object=_const("response"),
        created_at=COUNT,
        model=NAME,
        status=_one_of("completed", "incomplete", "in_progress", "failed", "cancelled"),
        output=_list(_object(id=NAME, type=_one_of("message", "reasoning", "function_call"), status=NAME)),
        error=_or_null(_object(code=NAME, message=TEXT)),
        usage=_or_null(_object(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT)),
    ),
    "InputTokensAnswer": _object(object=_const("response.input_tokens"), input_tokens=COUNT),
    "DeletedAnswer": _object(id=NAME, object=_const("response"), deleted=FLAG),
    "PageAnswer": _object(object=_const("list"), data=_list(_object(id=NAME)), has_more=FLAG),
    "MessageAnswer": _object(
        id=NAME,
        type=_const("message"),
        role=_const("assistant"),
        model=NAME,
        content=_list(_object(type=_one_of("text", "thinking", "tool_use"))),
        stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=_or_null(TEXT),
        usage=_object(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "CountAnswer": _object(input_tokens=COUNT),
    "TokenizedAnswer": _object(
        count=COUNT, max_model_len=COUNT, tokens=_list(COUNT), token_strs=_or_null(_list(TEXT))
    ),
    "DetokenizedAnswer": _object(prompt=TEXT),
    "ModelAnswer": _MODEL,
    "ModelsAnswer": _object(object=_const("list"), data=_list(_MODEL), has_more=FLAG),
    "AliveAnswer": _object(status=_const("alive")),
    "ReadinessAnswer": _object(status=_one_of("ready", "not ready"), models=_list(NAME), reasons=_list(TEXT)),
    "AcceptingAnswer": _object(status=_one_of("accepting", "not accepting")),
    "Error": _object(
        error=_object(message=NAME, type=NAME, param=_or_null(TEXT), code=_or_null(NAME)),
    ),
    "AnthropicError": _object(type=_const("error"), error=_object(type=NAME, message=NAME)),
}
