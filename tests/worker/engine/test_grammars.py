"""Random models are forced into grammars: what comes out is checked by who knows nothing of llguidance."""

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.types import Slice
from tests.tiny import VOCAB_SIZE, write_tokenizer
from tests.worker.engine.grammar_world import EOS, PROMPT, RandomModel, World

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "number"}]},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}


def of_schema(schema: object) -> str:
    options = {"x-guidance": {"whitespace_flexible": False}} | schema if isinstance(schema, dict) else schema
    return json.dumps({"grammars": [{"json_schema": options}]})


def of_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder, RandomModel())


def validates(text: str, schema: Any) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        (of_schema(PERSON), lambda text: validates(text, PERSON)),
        (of_lark(r"start: /[a-c]{3,9}-[0-9]+\.(x|yz)/"), re.compile(r"[a-c]{3,9}-[0-9]+\.(x|yz)").fullmatch),
        (of_lark('start: "yes" | "no" | "不知道"'), {"yes", "no", "不知道"}.__contains__),
        (of_lark('start: digit ("+" digit)*\ndigit: /[0-9]/'), re.compile(r"\d(\+\d)*").fullmatch),
        (of_lark("start: /[α-ω]{2,5}/"), re.compile("[α-ω]{2,5}").fullmatch),
    ],
    ids=["schema", "regex", "choice", "lark", "characters of several tokens"],
)
def test_what_a_random_model_says_is_of_the_grammar(
    world: World, grammar: str, check: Callable[[str], object]
) -> None:
    for seed in range(8):
        world.submit(seed, grammar, sampling={"seed": seed})
    world.run()
    texts = [world.text(seen.tokens) for seen in world.seen.values()]
    assert all(seen.finish == pb.FINISH_REASON_STOP for seen in world.seen.values())
    assert all(map(check, texts))
    assert len(set(texts)) > 1, "the model is random"


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const"]
    kind = draw(st.sampled_from(kinds + ["object", "array", "anyOf"] * (depth > 0)))
    match kind:
        case "enum":
            return {
                "enum": draw(st.lists(st.sampled_from([1, "x", "yes", None, True]), min_size=1, unique=True))
            }
        case "const":
            return {"const": draw(st.sampled_from([0, "fixed", False, [1, 2], {"k": "v"}]))}
        case "string":
            if draw(st.booleans()):
                return {"type": "string", "pattern": draw(st.sampled_from(["^[a-f]{2,6}$", "^(no|yes)$"]))}
            low = draw(st.integers(0, 3))
            return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 6))}
        case "integer":
            low = draw(st.integers(-50, 50))
            return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 1000))}
        case "number":
            return {"type": "number", "minimum": -10, "maximum": draw(st.integers(0, 99))}
        case "array":
            low = draw(st.integers(0, 2))
            items = draw(schemas(depth - 1))
            return {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + draw(st.integers(0, 2)),
            }
        case "anyOf":
            return {"anyOf": draw(st.lists(schemas(depth - 1), min_size=1, max_size=3))}
        case "object":
            names = draw(st.lists(st.sampled_from(["a", "b", "long name", "ß"]), unique=True))
            return {
                "type": "object",
                "properties": {name: draw(schemas(depth - 1)) for name in names},
                "required": [name for name in names if draw(st.booleans())],
                "additionalProperties": False,
            }
    return {"type": kind}


@given(schema=schemas(), seed=st.integers(0, 2**63))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_any_schema_the_output_validates(folder: Path, schema: dict[str, Any], seed: int) -> None:
    world = World(folder, RandomModel(seed % 97))
    seen = world.generate(of_schema(schema), max_tokens=1000, sampling={"seed": seed})
    assert (seen.error, seen.finish) == (None, pb.FINISH_REASON_STOP)
    jsonschema.validate(json.loads(world.text(seen.tokens)), schema)


def test_grammars_of_a_step_keep_to_themselves(folder: Path) -> None:
    """And texts without one are what they would be alone."""
    alone = World(folder, RandomModel()).generate(None, max_tokens=30)
    world = World(folder, RandomModel())
    free = world.submit(1, None, max_tokens=30)
    letters = world.submit(2, of_lark("start: /[a-z]{20}/"))
    digits = world.submit(3, of_lark("start: /[0-9]{20}/"))
    world.run()
    assert free.tokens == alone.tokens
    assert re.fullmatch("[a-z]{20}", world.text(letters.tokens))
    assert re.fullmatch("[0-9]{20}", world.text(digits.tokens))


@pytest.mark.parametrize("grammar", [of_schema(PERSON), of_lark("start: /[α-ω]{8}/")])
def test_resumed_at_any_token_the_text_is_the_same(folder: Path, grammar: str) -> None:
    whole = World(folder, RandomModel()).generate(grammar)
    assert len(whole.tokens) > 8
    world = World(folder, RandomModel())
    cuts = range(1, len(whole.tokens))
    for cut in cuts:
        world.submit(cut, grammar, whole.tokens[:cut])
    world.run()
    for cut in cuts:
        assert whole.tokens[:cut] + world.seen[cut].tokens == whole.tokens
        assert world.seen[cut].finish == whole.finish


def test_resumed_behind_its_end_it_ends(world: World) -> None:
    [token] = world.tokenizer.encode("a").ids
    seen = world.generate(of_lark('start: "a"'), resumed=[token])
    assert (seen.tokens, seen.finish) == ([EOS], pb.FINISH_REASON_STOP)


def test_preempted_texts_are_the_same(folder: Path) -> None:
    grammar = of_lark("start: /[a-z ]{60}/")
    expected = {}
    for handle in range(4):
        expected[handle] = World(folder, RandomModel()).generate(grammar, sampling={"seed": handle}).tokens
    # Pages for one of them, and a half.
    world = World(folder, RandomModel(), CacheLayout(4, 24))
    for handle in range(4):
        world.submit(handle, grammar, sampling={"seed": handle})
    world.run()
    assert world.scheduler.stats().preemptions > 0
    assert {handle: seen.tokens for handle, seen in world.seen.items()} == expected


def test_a_complete_text_ends_with_its_last_token(world: World) -> None:
    seen = world.generate(of_lark('start: "abc"'))
    assert world.text(seen.tokens) == "abc"
    assert EOS not in seen.tokens, "no step is spent on it"
    assert seen.finish == pb.FINISH_REASON_STOP


def test_one_that_can_go_on_ends_when_the_model_says_so(world: World) -> None:
    ends = [world.submit(seed, of_lark("start: /a*/"), sampling={"seed": seed}) for seed in range(6)]
    world.run()
    assert {seen.tokens[-1] for seen in ends} == {EOS}
    assert len({len(seen.tokens) for seen in ends}) > 1


def test_the_limit_cuts(world: World) -> None:
    seen = world.generate(of_lark("start: /a{300}/"), max_tokens=5)
    assert (len(seen.tokens), seen.finish) == (5, pb.FINISH_REASON_LENGTH)


def test_min_tokens_holds_as_long_as_the_grammar_has_more(world: World) -> None:
    long = world.generate(of_lark("start: /a*/"), min_tokens=50)
    assert len(long.tokens) > 50
    assert EOS not in long.tokens[:50]
    short = world.generate(of_lark('start: "ab" | "c"'), min_tokens=50)
    assert world.text(short.tokens) in ("ab", "c")
    assert short.finish == pb.FINISH_REASON_STOP
    # Nothing but the end may follow "a", which is known only when it is asked for.
    late = world.generate(of_lark("start: x\nx: /a/ /b?/ /c{0}/"), min_tokens=50)
    assert late.finish == pb.FINISH_REASON_STOP


def test_without_a_stop_token_it_goes_on_as_far_as_the_grammar_does(world: World) -> None:
    """`ignore_eos`."""
    seen = world.generate(of_lark("start: /a*/"), stop_token_ids=[], max_tokens=60)
    assert (EOS in seen.tokens, seen.finish) == (False, pb.FINISH_REASON_LENGTH)
    ended = world.generate(of_lark("start: /a{5}/"), stop_token_ids=[], max_tokens=60)
    assert (world.text(ended.tokens), ended.finish) == ("aaaaa", pb.FINISH_REASON_STOP)


def test_ids_that_the_tokenizer_has_not_are_never_drawn(folder: Path) -> None:
    class Eager(RandomModel):
        """Wants nothing but them."""

        def _row(self, piece: Any) -> torch.Tensor:
            row = super()._row(piece)
            row[VOCAB_SIZE:] += 1000
            return row

    world = World(folder, Eager())
    assert min(world.generate(None, max_tokens=5).tokens) >= VOCAB_SIZE
    seen = world.generate(of_lark("start: /(.|\\n){0,40}/"), max_tokens=40)
    assert max(seen.tokens) < VOCAB_SIZE


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ("", "cannot be compiled"),
        ("start: nosuch", "nosuch"),
        (of_lark("start: nosuch"), "nosuch"),
        (of_schema({"type": "objct"}), "objct"),
    ],
    ids=["empty", "bare lark", "unknown name", "schema"],
)
def test_what_does_not_compile_is_refused_and_the_others_go_on(world: World, grammar: str, word: str) -> None:
    other = world.submit(1, None, max_tokens=20)
    bad = world.submit(2, grammar)
    world.run()
    assert bad.error is not None
    assert (bad.error.reason, bad.error.retryable, bad.error.in_step) == (pb.REASON_BAD_REQUEST, False, False)
    assert word in bad.error.message
    assert len(other.tokens) == 20


def test_resumed_tokens_of_another_grammar_are_refused(world: World) -> None:
    seen = world.generate(of_lark('start: "abc"'), resumed=world.tokenizer.encode("xyz").ids)
    assert seen.error is not None
    assert seen.error.reason == pb.REASON_BAD_REQUEST
    assert "resumed" in seen.error.message


def test_cancelled_while_it_is_compiled_it_never_runs(world: World) -> None:
    world.submit(1, of_schema(PERSON))
    world.cancel(1)
    del world.seen[1]
    world.generate(of_lark('start: "abc"'))
    assert world.grammars.compiling == 0
    assert 1 not in world.grammars
    assert world.scheduler.stats().waiting == 0


def test_nothing_is_kept_of_requests_that_are_over(world: World) -> None:
    world.submit(1, of_lark('start: "abc"'))
    world.submit(2, of_schema(PERSON), max_tokens=3)
    world.submit(3, of_lark("start: nosuch"))
    world.run()
    assert world.grammars.compiling == 0
    assert set(world.seen) == {1, 2, 3}
    assert not any(handle in world.grammars for handle in world.seen)


def test_a_step_that_raises_moves_no_matcher_of_those_that_are_tried_again(folder: Path) -> None:
    """The gateway submits them anew, with what was delivered."""

    class Failing(RandomModel):
        def step(self, slices: Any, progress: Any) -> Any:
            if len(self.steps) == 5:
                self.steps.append(())
                raise ArithmeticError("no such kernel")
            return super().step(slices, progress)

    grammar = of_schema(PERSON)
    expected = World(folder, RandomModel()).generate(grammar).tokens
    world = World(folder, Failing())
    broken = world.submit(1, grammar)
    world.run()
    assert broken.error is not None
    again = world.generate(grammar, resumed=broken.tokens)
    assert broken.tokens + again.tokens == expected


def test_logprobs_are_those_of_the_model_and_not_of_the_grammar(folder: Path) -> None:
    """Where the grammar leaves no choice they still say how likely the token was."""
    world = World(folder, RandomModel())
    seen = world.generate(of_lark('start: "hello"'), sampling={"logprobs": 5})
    for one in seen.logprobs:
        assert math.isfinite(one.logprob)
        assert all(map(math.isfinite, one.top_logprobs))
        assert one.logprob < max(one.top_logprobs) < 0
    # The first row, by hand.
    model = RandomModel()
    [row], _ = model.step([Slice(1, tuple(PROMPT), 0, (0,), True)], lambda: None)
    best = row.log_softmax(-1).topk(5)
    assert list(seen.logprobs[0].top_token_ids) == best.indices.tolist()
    assert seen.logprobs[0].logprob == pytest.approx(float(row.log_softmax(-1)[seen.tokens[0]]), abs=1e-5)


def test_a_bias_counts_within_the_grammar(world: World) -> None:
    [yes] = world.tokenizer.encode("y").ids[:1]
    grammar = of_lark('start: "y" | "n"')
    for seed in range(12):
        world.submit(seed, grammar, sampling={"seed": seed, "logit_bias": {yes: 50}})
    world.run()
    assert {world.text(seen.tokens) for seen in world.seen.values()} == {"y"}


def too_wide(noticed: str) -> str:
    if noticed == "as the next token is asked for":
        return of_lark("start: /(a{1000}){1000}/")
    # More readings of an "a" than the library follows at a time.
    names = [f"x{i}" for i in range(2500)]
    rules = "\n".join(f'{name}: "a" /b{{{i}}}/' for i, name in enumerate(names))
    return of_lark(f"start: {' | '.join(names)}\n{rules}")


NOTICED = pytest.mark.parametrize("noticed", ["as the next token is asked for", "as a token is taken"])


@pytest.mark.timed
@pytest.mark.usefixtures("frozen_heap")
@NOTICED
def test_a_grammar_that_takes_too_much_to_follow_fails_its_request_alone(world: World, noticed: str) -> None:
    grammar = too_wide(noticed)
    good = world.submit(1, None, max_tokens=20)
    bad = world.submit(2, grammar)
    begun = time.process_time()
    world.run()
    assert time.process_time() - begun < 1, "its neighbours wait for its masks"
    assert bad.error is not None
    assert (bad.error.reason, bad.error.retryable) == (pb.REASON_BAD_REQUEST, False)
    assert "cannot be followed" in bad.error.message
    assert len(good.tokens) == 20
    assert world.scheduler.stats().running == 0


@NOTICED
def test_one_that_is_faulty_besides_is_told_so_once(folder: Path, noticed: str) -> None:
    class Faulty(RandomModel):
        def step(self, slices: Any, progress: Any) -> Any:
            logits, _ = super().step(slices, progress)
            return logits, lambda: frozenset({2} & {piece.handle for piece in slices})

    world = World(folder, Faulty())
    failures: list[pb.Failure] = []
    send = world.send

    def keeping(frame: engine_pb2.EngineFrame) -> None:
        failures.extend(frame.end.failures)
        send(frame)

    world.send = keeping  # type: ignore[method-assign]
    good = world.submit(1, None, max_tokens=20)
    world.submit(2, too_wide(noticed))
    world.run()
    [failure] = failures
    assert (failure.handle, failure.error.message) == (2, "its hidden states are not finite")
    assert len(good.tokens) == 20
