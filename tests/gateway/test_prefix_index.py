"""What is remembered of where prompts were sent: bounded, and gone with the incarnation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_gateway.workers.prefix_index import HOLDERS, LOOKS, PrefixIndex
from moebius_gateway.workers.routing import AFFINITY_BLOCKS, BLOCK, prefix_blocks


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


# Of five conversations, how much each has in common with the one before, and which worker got how much of it.
families = st.tuples(
    st.lists(st.integers(0, 80), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(0, HOLDERS - 1), st.integers(0, 4), st.integers(1, 80)), max_size=12),
)


@settings(max_examples=200, deadline=None)
@given(families)
def test_all_that_have_some_of_it_are_found_about_as_deep_as_they_have_it(
    family: tuple[list[int], list[tuple[int, int, int]]],
) -> None:
    shared, learnt = family
    known = index(100_000, **{f"i{worker}": f"w{worker}" for worker in range(HOLDERS)})
    prompts: list[tuple[int, ...]] = [()]
    for number, common in enumerate(shared):
        own = range(1000 * number, 1000 * number + 80 - common)
        prompts.append((*prompts[-1][:common], *own))
    # Each token stands for a block.
    whole = [prefix_blocks([token for token in prompt for _ in range(BLOCK)]) for prompt in prompts]
    for worker, prompt, length in learnt:
        known.learn(whole[prompt][:length], f"i{worker}")
    for asked in whole:
        found = known.match(asked)
        has = {
            f"w{worker}": max(
                (
                    len(set(asked) & set(whole[prompt][:length]))
                    for by, prompt, length in learnt
                    if by == worker
                ),
                default=0,
            )
            for worker in range(HOLDERS)
        }
        for address, count in has.items():
            seen = found.get(address, 0)
            assert seen <= count
            assert min(count, AFFINITY_BLOCKS) - min(seen, AFFINITY_BLOCKS) <= AFFINITY_BLOCKS // LOOKS
            if count == max(has.values()):
                assert seen == count
