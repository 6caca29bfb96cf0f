"""What is remembered of where prompts were sent: bounded, and gone with the incarnation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_gateway.workers.prefix_index import HOLDERS, PrefixIndex
from moebius_gateway.workers.routing import BLOCK, prefix_blocks


def blocks(count: int, start: int = 0) -> tuple[int, ...]:
    return prefix_blocks(range(start, start + count * BLOCK))


def index(capacity: int = 1000, **workers: str) -> PrefixIndex:
    """`workers`: incarnation to address."""
    made = PrefixIndex(capacity)
    for incarnation, address in workers.items():
        made.add(incarnation, address)
    return made


def test_the_longest_known_beginning_is_found() -> None:
    known = index(i1="a", i2="b")
    tokens = tuple(range(4 * BLOCK))
    known.learn(prefix_blocks(tokens), "i1")
    known.learn(prefix_blocks((*tokens[: 2 * BLOCK], *tokens)), "i2")
    assert known.match(prefix_blocks((*tokens, *tokens))) == {"a": 4, "b": 2}
    assert known.match(prefix_blocks(tokens[1:])) == {}
    assert known.match(()) == {}


def test_models_do_not_share_prefixes() -> None:
    assert not set(prefix_blocks(range(BLOCK), "one")) & set(prefix_blocks(range(BLOCK), "other"))


def test_what_is_known_of_an_incarnation_goes_with_it() -> None:
    known = index(i1="a", i2="b")
    for incarnation in ("i1", "i2"):
        known.learn(blocks(3), incarnation)
    known.drop("i1")
    known.add("i3", "a")
    assert known.match(blocks(3)) == {"b": 3}
    # Nor does it take a place among the holders of what others learn.
    known.learn(blocks(3), "i3")
    assert known.match(blocks(3)) == {"a": 3, "b": 3}


def test_those_that_got_a_block_last_are_remembered() -> None:
    names = [f"i{number}" for number in range(HOLDERS + 2)]
    known = index(**{name: name.upper() for name in names})
    for name in names:
        known.learn(blocks(1), name)
    assert set(known.match(blocks(1))) == {name.upper() for name in names[2:]}


def test_it_is_bounded_and_keeps_what_is_used() -> None:
    known = index(capacity=40, i1="a")
    for start in range(1, 500):
        known.learn(blocks(4), "i1")
        known.learn(blocks(4, start * 1000), "i1")
        assert len(known) <= 40 + 4
    assert known.match(blocks(4)) == {"a": 4}
    assert known.match(blocks(4, 1000)) == {}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=30))
def test_what_is_known_of_a_prompt_is_a_beginning_of_it(learnt: list[tuple[int, int]]) -> None:
    known = index(capacity=16, i1="a")
    for prompt, length in learnt:
        known.learn(blocks(length, prompt * 1000), "i1")
        for one in range(5):
            there = [known._holders(block) != () for block in blocks(12, one * 1000)]
            assert there == sorted(there, reverse=True)
            assert known.match(blocks(12, one * 1000)) == ({"a": sum(there)} if any(there) else {})
