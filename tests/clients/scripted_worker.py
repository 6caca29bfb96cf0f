"""A worker that says what a script makes of the prompt: speaks worker.proto, writes as Qwen3 does.

It reasons when asked to think, calls tools one after the other as they are offered, giving each the result
of the one before, and repeats what it is told. Every answer is a function of the prompt, so that a test can
know it.
"""

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.worker_standin import Plan, Running, StandIn
from tests.tiny import EOS_TOKEN_ID

THINKING = "think"


def answer(prompt: str) -> str:
    """`prompt` is in the template of tests.gateway.api.chatty."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    asked = max((i for i, (role, _) in enumerate(turns) if role == "user"), default=None)
    if asked is None:
        return f"You said: {prompt}"
    results = [text for role, text in turns[asked:] if role == "tool"]
    names = _offered(prompt)
    if len(results) < len(names):
        return _call(names[len(results)], results[-1] if results else turns[asked][1])
    if results:
        return f"Done: {', '.join(results)}."
    thought = "<think>\nLet me see.\n</think>\n\n" if THINKING in turns[asked][1] else ""
    return f"{thought}You said: {turns[asked][1]}"


def _offered(prompt: str) -> list[str]:
    """Names of tools, in the order of the request."""
    found = re.search(r"<tools>(.*?)</tools>", prompt, re.DOTALL)
    return [tool["function"]["name"] for tool in json.loads(found[1])] if found else []


def _call(name: str, text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'text': text}})}\n</tool_call>"


class ScriptedWorker(StandIn):
    def __init__(self, plan: Plan, tokenizer: Path) -> None:
        super().__init__(plan)
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._answers: dict[int, list[int]] = {}

    def _advance(self, one: Running) -> pb.Delta:
        ids = self._answers.setdefault(id(one), self._answer(one.submit))
        token = ids[one.generated]
        one.generated += 1
        delta = pb.Delta(handle=one.handle, token_ids=[token])
        if one.submit.sampling.HasField("logprobs"):
            delta.logprobs.add(logprob=-token / 100)
        if token == EOS_TOKEN_ID:
            delta.finish_reason = pb.FINISH_REASON_STOP
        elif one.generated >= one.submit.max_tokens:
            delta.finish_reason = pb.FINISH_REASON_LENGTH
        if delta.finish_reason:
            del one.stream.running[one.handle]
            del self._answers[id(one)]
        return delta

    def _answer(self, submit: pb.Submit) -> list[int]:
        prompt = list(submit.token_ids)[: len(submit.token_ids) - submit.resumed]
        text = answer(self._tokenizer.decode(prompt, skip_special_tokens=False))
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, EOS_TOKEN_ID]
