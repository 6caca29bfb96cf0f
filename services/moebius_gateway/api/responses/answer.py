"""Answers of POST /v1/responses: the object, and the events in which it comes to be."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from moebius_gateway.api.answer import Answer, Call, Part, Said, Thought
from moebius_gateway.api.choices import Choice, Usage
from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.openai.shared import chat_logprobs
from moebius_gateway.api.responses.items import item_id, item_json, text_part
from moebius_gateway.api.sse import named_event
from moebius_gateway.text.assembler import AnswerDelta, TextLogprobs
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import FinishReason

Json = dict[str, Any]


class ResponsesDialect:
    """One item is open at a time; a delta of another kind closes it and opens the next."""

    def __init__(
        self,
        model: str,
        told: Mapping[str, Any],
        token_bytes: TokenBytes,
        keep: Callable[[Json], None],
        *,
        logprobs: bool,
        encrypted: bool,
    ) -> None:
        """`told`: what the response repeats of its request. `keep` gets it when it is whole."""
        self.id = f"resp_{secrets.token_hex(24)}"
        self._base: Json = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        } | dict(told)
        self._token_bytes = token_bytes
        self._keep = keep
        self._with_logprobs = logprobs
        self._encrypted = encrypted
        self._number = 0
        self._output: list[Json] = []
        self._open: Part | None = None
        self._id = ""
        self._logprobs: list[Json] = []
        self._finish: FinishReason | None = None

    # ---- in one piece -------------------------------------------------------------------------------

    def response(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return orjson.dumps(self.whole(answers[0], usage))

    def whole(self, answer: Answer, usage: Usage) -> Json:
        logprobs = self._logprobs_json(answer.logprobs)
        for part in answer.parts:
            self._output.append(self._item(part, item_id(part), _status(part), logprobs))
            if isinstance(part, Said):
                logprobs = []  # those of an answer that is said in several parts stand with the first
        self._finish = answer.finish_reason
        return self._finished(usage)

    def unfinished(self, status: str, error: Json | None = None) -> Json:
        """As long as it is not whole, or never will be."""
        return self._base | {"status": status, "output": self._output, "error": error}

    def _finished(self, usage: Usage) -> Json:
        cut = self._finish is FinishReason.LENGTH
        response = self._base | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": _usage_json(usage),
        }
        self._keep(response)
        return response

    # ---- as events ----------------------------------------------------------------------------------

    def chunk(self, choice: Choice, delta: AnswerDelta) -> bytes:
        events: list[Json] = []
        if not self._number:
            for kind in ("created", "in_progress"):
                events.append({"type": f"response.{kind}", "response": self.unfinished("in_progress")})
        logprobs = self._logprobs_json(delta.logprobs)
        for said in delta.events:
            events += self._events(said, logprobs)
            logprobs = []
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            events += self._close(whole=not isinstance(self._open, Call))
        return self._written(events)

    def end(self, usage: Usage) -> bytes:
        response = self._finished(usage)
        return self._written([{"type": f"response.{response['status']}", "response": response}])

    def error(self, error: ApiError) -> bytes:
        told = {"code": error.code or error.type, "message": error.message}
        return self._written(
            [
                {"type": "error", **told, "param": error.param},
                {"type": "response.failed", "response": self.unfinished("failed", told)},
            ]
        )

    def _events(self, said: Event, logprobs: list[Json]) -> Iterator[Json]:
        match said:
            case ContentDelta(text):
                if not isinstance(self._open, Said):
                    yield from self._opened(Said(""))
                    yield self._content("content_part.added", part=text_part(""))
                assert isinstance(self._open, Said)
                self._open.text += text
                self._logprobs += logprobs
                yield self._content("output_text.delta", delta=text, logprobs=logprobs)
            case ReasoningDelta(text):
                if not isinstance(self._open, Thought):
                    yield from self._opened(Thought(""))
                    yield self._content("content_part.added", part={"type": "reasoning_text", "text": ""})
                assert isinstance(self._open, Thought)
                self._open.text += text
                yield self._content("reasoning_text.delta", delta=text)
            case ToolCallStart(_, call_id, name):
                yield from self._opened(Call(call_id, name))
            case ToolCallArguments(_, text):
                assert isinstance(self._open, Call)
                self._open.arguments += text
                yield self._of_item("function_call_arguments.delta", delta=text)
            case ToolCallEnd():
                yield from self._close()

    def _opened(self, part: Part) -> Iterator[Json]:
        # A call that has no end when something else comes was unreadable.
        yield from self._close(whole=not isinstance(self._open, Call))
        self._open, self._id = part, item_id(part)
        yield self._placed("output_item.added", item=self._item(part, self._id, "in_progress"))

    def _close(self, *, whole: bool = True) -> Iterator[Json]:
        part, self._open = self._open, None
        match part:
            case None:
                return
            case Said(text):
                yield self._content("output_text.done", text=text, logprobs=self._logprobs)
                yield self._content("content_part.done", part=text_part(text, self._logprobs))
            case Thought(text):
                yield self._content("reasoning_text.done", text=text)
                yield self._content("content_part.done", part={"type": "reasoning_text", "text": text})
            case Call(_, name, arguments) if whole:
                yield self._of_item("function_call_arguments.done", name=name, arguments=arguments)
        item = self._item(part, self._id, "completed" if whole else "incomplete", self._logprobs)
        yield self._placed("output_item.done", item=item)
        self._output.append(item)
        self._logprobs = []

    def _placed(self, kind: str, **data: Any) -> Json:
        return {"type": f"response.{kind}", "output_index": len(self._output), **data}

    def _of_item(self, kind: str, **data: Any) -> Json:
        return self._placed(kind, item_id=self._id, **data)

    def _content(self, kind: str, **data: Any) -> Json:
        return self._of_item(kind, content_index=0, **data)

    def _written(self, events: Sequence[Json]) -> bytes:
        written = b""
        for event in events:
            written += named_event(event | {"sequence_number": self._number})
            self._number += 1
        return written

    # ---- pieces -------------------------------------------------------------------------------------

    def _item(self, part: Part, id_: str, status: str, logprobs: Sequence[Json] = ()) -> Json:
        return item_json(part, id_, status, encrypted=self._encrypted, logprobs=logprobs)

    def _logprobs_json(self, tokens: Sequence[TextLogprobs]) -> list[Json]:
        return chat_logprobs(tokens, self._token_bytes) if self._with_logprobs else []


def _status(part: Part) -> str:
    return "incomplete" if isinstance(part, Call) and not part.whole else "completed"


def _usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
