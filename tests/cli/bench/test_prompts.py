"""Prompts of a length that share what they should and no more."""

from itertools import combinations, takewhile

from moebius_cli.bench.prompts import WORDS, Prompts

# Of a prefix cache's page of 16 tokens, words that two of a hundred prompts never share by chance (64^-8).
CHANCE = 8


def common(a: list[str], b: list[str]) -> int:
    """Words at the beginning of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))


def test_prompts_have_their_words_and_no_common_beginning() -> None:
    # Two runs, as two commands make them.
    prompts = [source.next().split() for source in (Prompts(0, 100), Prompts(0, 100)) for _ in range(50)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert max(common(*pair) for pair in combinations(prompts, 2)) < CHANCE


def test_prompts_share_the_prefix_that_is_asked_for() -> None:
    source = Prompts(70, 30)
    prompts = [source.next().split() for _ in range(50)]
    assert {len(prompt) for prompt in prompts} == {100}
    shared = [common(*pair) for pair in combinations(prompts, 2)]
    assert min(shared) >= 70
    assert max(shared) < 70 + CHANCE


def test_each_round_has_every_word() -> None:
    drawn = Prompts(0, 2 * len(WORDS)).next().split()
    assert sorted(drawn) == sorted(WORDS * 2)
    assert len(set(WORDS)) == len(WORDS)
